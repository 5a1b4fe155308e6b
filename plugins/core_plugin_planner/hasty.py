"""The stages that load the fewest bytes, in whichever order of the nodes: found by best-first search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, groupby

from core import PlanRequest
from core_plugin_planner.costs import NodeCosts

Path = tuple[tuple[int, int], ...]
"""Stages in order, each its node's index and the end of its layers."""

Key = tuple[int, int, tuple[float, ...], int, Path]
"""How good stages are, and which: the least is the best.

Bytes to load, the number of stages, the nodes' fills from the fullest, and the nodes as bits, the last to join highest.
Of the first stages of a plan the bytes and the number are the least that it can come to.
"""

STEPS = 50_000
"""How many stages the search among all orders looks at before it gives up."""
ORDERLY_STEPS = 200_000
"""How many the orderly search looks at, which is left for where the other one gives up."""


def hasty_stages(request: PlanRequest, nodes: Sequence[NodeCosts], most: int) -> Path | None:
    """The best stages, at most so many; None where none are found.

    They are the best of all, unless the search for these takes more than STEPS: then they are the best of an orderly
    search, where nodes that hold layers follow in the order of these, and the others from the largest.
    """
    orderly = _Search(request, nodes, most, orderly=True).best(ORDERLY_STEPS)
    best = _Search(request, nodes, most, orderly=False).best(STEPS, orderly) or orderly
    return None if best is None else best[-1]


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What can come of the nodes that are left: which may be next; and for the layers from n on, two lower bounds.

    `loads[n]` are the bytes of those layers that none of the nodes holds. `stages[n]` is how many stages those layers
    take; more than may be used, where the nodes can't hold them.
    """

    following: tuple[int, ...]
    loads: tuple[int, ...]
    stages: tuple[int, ...]


class _Search:
    """A*: the stages that promise the best key are extended first, so the first that hold all layers are the best.

    Nodes that hold nothing are spares. Of two spares the larger is always the better one, so a plan with the smaller
    uses the larger as well; and of spares of one size the first to join is used first. In an orderly search the largest
    spare is used first, and each node that holds layers is used in its turn or passed over.
    """

    def __init__(self, request: PlanRequest, nodes: Sequence[NodeCosts], most: int, *, orderly: bool) -> None:
        self._nodes, self._fewest, self._most = nodes, request.min_stages, most
        self._sizes, self._weights = request.layer_bytes, request.weight_bytes or request.layer_bytes
        self._layers = len(self._sizes)
        holding = {index: sum(node.held) / len(node.held) for index, node in enumerate(nodes) if node.held}
        self._holders = sorted(holding, key=lambda index: (holding[index], index))
        self._spares = sorted({*range(len(nodes))}.difference(holding), key=lambda index: (-nodes[index].memory, index))
        self._orderly = orderly
        self._queues = [self._holders, self._spares]
        """Of each queue the first node that is left may be next."""
        if not orderly:
            by_size = groupby(self._spares, key=lambda index: nodes[index].memory)
            self._queues = [*([index] for index in self._holders), *([*group] for _, group in by_size)]
        self._known: dict[int, _Outlook] = {}

    def best(self, steps: int, known: Key | None = None) -> Key | None:
        """The best stages that are better than `known`; None where there are none, or where it takes more steps."""
        everyone = (1 << len(self._nodes)) - 1
        queue: list[tuple[Key, int]] = [((self._outlook(everyone).loads[0], 0, (), 0, ()), everyone)]
        seen = set()
        while queue and steps > 0:
            key, left = heappop(queue)
            path = key[-1]
            start = path[-1][1] if path else 0
            if start == self._layers:
                return key
            least, most = max(0, self._fewest - len(path)), min(self._most - len(path), left.bit_count())
            if (state := (left, start, least, most)) in seen:
                continue
            seen.add(state)
            for index in self._outlook(left).following:
                without = left & ~(1 << index)
                ends = self._ends(index, start, len(path))
                steps -= len(ends) + 1
                for extended in self._extended(key, start, left, index, ends):
                    if extended[1] <= self._most and (known is None or extended < known):
                        heappush(queue, (extended, without))
                if self._orderly and self._nodes[index].held:
                    heappush(queue, (self._passed_over(key, start, left, without), without))
        return None

    def _ends(self, index: int, start: int, stages: int) -> range:
        """Where a stage from `start` on may end, behind so many stages: each that must follow needs a layer."""
        needed = max(0, self._fewest - stages - 1)
        return range(start + 1, min(self._nodes[index].furthest(start), self._layers - needed) + 1)

    def _extended(self, key: Key, start: int, left: int, index: int, ends: range) -> Iterator[Key]:
        """The stages of `key` and one more, on the node `index`."""
        promised, _, fills, used, path = key
        node, after = self._nodes[index], self._outlook(left & ~(1 << index))
        loaded = promised - self._outlook(left).loads[start] - node.loads[start]
        for end in ends:
            yield (
                loaded + node.loads[end] + after.loads[end],
                len(path) + 1 + after.stages[end],
                tuple(sorted((*fills, node.fill(start, end)), reverse=True)),
                used | 1 << index,
                (*path, (index, end)),
            )

    def _passed_over(self, key: Key, start: int, left: int, without: int) -> Key:
        """The same stages, where fewer nodes may follow."""
        promised, _, fills, used, path = key
        after = self._outlook(without)
        loaded = promised - self._outlook(left).loads[start] + after.loads[start]
        return loaded, len(path) + after.stages[start], fills, used, path

    def _outlook(self, left: int) -> _Outlook:
        """What can come of the nodes `left`, as bits."""
        if left not in self._known:
            self._known[left] = _Outlook(tuple(self._following(left)), self._loads(left), self._stages(left))
        return self._known[left]

    def _following(self, left: int) -> Iterator[int]:
        for queue in self._queues:
            yield from [index for index in queue if left >> index & 1][:1]

    def _loads(self, left: int) -> tuple[int, ...]:
        held = frozenset[int]().union(*(self._nodes[index].held for index in self._holders if left >> index & 1))
        loads = (0 if layer in held else self._weights[layer] for layer in reversed(range(self._layers)))
        return (*accumulate(loads, initial=0),)[::-1]

    def _stages(self, left: int) -> tuple[int, ...]:
        """As many nodes as have the memory in all, from the largest; and the spares that are larger than a used one."""
        nodes = [node for index, node in enumerate(self._nodes) if left >> index & 1]
        total = sum(self._sizes)
        rooms = sorted((max(0, node.memory + total - node.takes[-1]) for node in nodes), reverse=True)
        together = [*accumulate(rooms, initial=0)]
        used = [index for index in self._spares if not left >> index & 1]
        least = min((self._nodes[index].memory for index in used), default=0)
        owed = sum(bool(left >> index & 1) for index in self._spares if used and self._nodes[index].memory > least)
        counts = (bisect_left(together, size) for size in accumulate(reversed(self._sizes), initial=0))
        return tuple(max(owed, count) if count <= len(nodes) else self._most + 1 for count in counts)[::-1]
