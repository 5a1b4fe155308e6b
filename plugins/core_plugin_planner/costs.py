"""What layers cost each node, of its memory and to load; and the borders at which given nodes share them best."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from core import Candidate, PlanRequest


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What the first n layers take of a node's memory (`takes[n]`), and how many bytes it loads for them (`loads[n]`).

    Loading costs nothing in a plan that is not made in haste. `held` are those of the layers that the node has.
    """

    memory: int
    takes: tuple[int, ...]
    loads: tuple[int, ...]
    held: frozenset[int]

    @classmethod
    def of(cls, node: Candidate, request: PlanRequest) -> NodeCosts:
        layers = request.layer_bytes
        weights = request.weight_bytes or layers
        takes = [size - kept for size, kept in zip(layers, pinned_weights(request, node.pinned), strict=True)]
        loads = [weights[i] if request.in_haste and i not in node.held else 0 for i in range(len(layers))]
        held = node.held.intersection(range(len(layers)))
        return cls(node.memory, (0, *accumulate(takes)), (0, *accumulate(loads)), held)

    def first(self, end: int) -> int:
        """The least n such that the node can hold layers [n, end); `end` or more where it can hold none."""
        return bisect_left(self.takes, self.takes[end] - self.memory)

    def furthest(self, start: int) -> int:
        """The greatest n such that the node can hold layers [start, n); `start` or less where it can hold none."""
        return bisect_right(self.takes, self.takes[start] + self.memory) - 1

    def fill(self, start: int, end: int) -> float:
        """Which part of the node's memory layers [start, end) take."""
        return (self.takes[end] - self.takes[start]) / max(self.memory, 1)


def pinned_weights(request: PlanRequest, pinned: frozenset[int]) -> list[int]:
    """What each layer takes less where it is pinned: its weights, where their size is known; 0 for all others."""
    known = request.weight_bytes
    return [known[i] if known and i in pinned else 0 for i in range(len(request.layer_bytes))]


def best_borders(nodes: Sequence[NodeCosts]) -> tuple[int, ...]:
    """The layer at which each stage starts, and the end, so that the fewest bytes are loaded.

    Of these the fills, fullest first, are least. The nodes must be able to hold the layers, in their order.
    """
    layers = len(nodes[0].takes) - 1
    best: list[tuple[int, tuple[float, ...], tuple[int, ...]] | None] = [None] * layers + [(0, (), (layers,))]
    for node in reversed(nodes):
        following, best = best, []
        for start in range(layers + 1):
            splits = []
            for end in range(start + 1, node.furthest(start) + 1):
                if (rest := following[end]) is not None:
                    fills = tuple(sorted((node.fill(start, end), *rest[1]), reverse=True))
                    splits.append((node.loads[end] - node.loads[start] + rest[0], fills, (start, *rest[2])))
            best.append(min(splits, default=None))
    assert best[0] is not None, "the nodes were chosen because they hold the layers"
    return best[0][2]
