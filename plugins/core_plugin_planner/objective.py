"""What is to be made small, over all orders of nodes and all their borders; and the best borders of a given order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import numpy as np

from core_plugin_planner.problem import NEVER, VIOLATION, Array

Order = tuple[int, ...]
"""Nodes, by their indices."""
Path = tuple[tuple[int, int], ...]
"""Stages in order, each its node's index and the end of its layers."""


def stages_of(path: Path) -> list[tuple[int, int, int]]:
    """Node, start and end of each stage."""
    starts = (0, *(end for _, end in path))
    return [(node, start, end) for (node, end), start in zip(path, starts, strict=False)]


@dataclass(frozen=True, slots=True)
class Objective:
    """The costs of stages [node, start, end] and of wires [from, to], the coordinator being behind the last node.

    They are added up, or it is their `bottleneck` that counts: the greatest. From `fewest` to `most` nodes are used,
    and all that are `required` among them.
    """

    stages: Array
    wires: Array
    fewest: int
    most: int
    required: frozenset[int]
    bottleneck: bool = False

    @property
    def nodes(self) -> int:
        return len(self.stages)

    @property
    def layers(self) -> int:
        return int(self.stages.shape[1]) - 1

    def join(self, *costs: Array) -> Array:
        """The cost of all of them."""
        joined: Array = reduce(np.maximum if self.bottleneck else np.add, costs)
        return joined

    def shortage(self, stages: int) -> int:
        """What it costs to use so many nodes."""
        return NEVER if stages > self.most else VIOLATION * max(0, self.fewest - stages)

    def extended(self, head: Array, before: int, node: int) -> Array:
        """The head that has one more node: `before` is its last one."""
        reached = self.join(head, self.wires[before, node])
        extended: Array = np.minimum(self.join(reached[:, None], self.stages[node]).min(axis=0), NEVER)
        return extended

    def heads(self, order: Sequence[int]) -> list[Array]:
        """For each number of the first nodes: the least cost at which they have the layers before n, by n."""
        start = np.full(self.layers + 1, NEVER)
        start[0] = 0
        steps = zip((-1, *order), order, strict=False)
        return list(accumulate(steps, lambda head, step: self.extended(head, *step), initial=start))

    def tails(self, order: Sequence[int]) -> list[Array]:
        """For each number of nodes that went before: what those that follow cost with the layers from n on, by n.

        The wire to the first of them is not counted, the one home is.
        """
        end = np.full(self.layers + 1, NEVER)
        end[-1] = 0
        tails = [end]
        for node, after in reversed([*zip(order, (*order[1:], -1), strict=False)]):
            there = self.join(tails[-1], self.wires[node, after])
            tails.append(np.minimum(self.join(there[None, :], self.stages[node]).min(axis=1), NEVER))
        return tails[::-1]

    def closed(self, head: Array, before: int, after: int, tail: Array) -> int:
        """What a head and a tail cost together: `before` is the last node of the one, `after` the other's first."""
        return int(self.join(head, tail, self.wires[before, after]).min())

    def cost(self, order: Sequence[int]) -> int:
        """Of the nodes in this order, with the best borders."""
        if not order:
            return NEVER
        return int(self.join(self.heads(order)[-1][-1], self.wires[order[-1], -1])) + self.shortage(len(order))

    def cost_of(self, path: Path) -> int:
        """Of these stages."""
        nodes = [node for node, _ in path]
        return int(
            self.join(*(self.stages[stage] for stage in stages_of(path)), *self.wires[(-1, *nodes), (*nodes, -1)])
        )

    def path(self, order: Sequence[int]) -> Path:
        """The nodes in this order with the best borders, the earliest of those that are equally good."""
        tails, path, start = self.tails(order), [], 0
        for index, (node, after) in enumerate(zip(order, (*order[1:], -1), strict=False)):
            start = int(self.join(self.stages[node, start], tails[index + 1], self.wires[node, after]).argmin())
            path.append((node, start))
        return tuple(path)
