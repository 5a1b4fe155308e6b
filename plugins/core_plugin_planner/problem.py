"""A request as arrays: what each stage that could be would cost, and each wire. All times are whole nanoseconds.

Whole numbers add up the same in any order, so that plans which are equally good are seen to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_high
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from core import COORDINATOR, Candidate, PlanRequest, Wire
from core_plugin_planner.costs import NodeCosts

Array: TypeAlias = NDArray[np.int64]

NEVER = 2**60
"""The cost of what can't be. Seven of them still add up within 64 bits."""
VIOLATION = 2**52
"""The cost of each layer that does not fit its node, or that is not where it is pinned: more than any plan takes."""
MAX_ROW_SECONDS, MAX_LOAD_SECONDS = 8.0, 256.0
"""What a layer takes at most, so that no plan takes as much."""
NANOSECONDS = 10**9
ASSUMED_SPEED = 10e9
"""Bytes of weights that a node reads in a second, if the speed of no node is known: all are alike then."""
ASSUMED_WIRE = Wire(0.0005)
"""A wire that was not measured, if none was."""
ASSUMED_LOAD_SPEED = 500e6
"""Bytes that a node loads from its disk in a second, if that was measured on no node."""
DOWNLOAD_SPEED = 30e6
"""Bytes that come over the internet in a second."""
MAX_WEIGHED = 32
"""Nodes that are weighed against each other at first."""
LOAD_OVERHEAD = 1.0
"""Seconds that a node takes to load any layer at all, besides its bytes."""


@dataclass(frozen=True)
class Problem:
    """Nodes are told by the index of the candidate. In wires the coordinator is behind the last of them.

    Stages are indexed [node, start, end]: those that end before they begin can't be.
    """

    request: PlanRequest

    @property
    def nodes(self) -> tuple[Candidate, ...]:
        return self.request.candidates

    @property
    def layers(self) -> int:
        return len(self.request.layer_bytes)

    @property
    def weights(self) -> tuple[int, ...]:
        return self.request.weight_bytes or self.request.layer_bytes

    @property
    def fewest(self) -> int:
        return self.request.min_stages

    @property
    def most(self) -> int:
        bounds = (self.request.max_stages, self.layers, len(self.nodes))
        return min(bound for bound in bounds if bound is not None)

    @cached_property
    def required(self) -> frozenset[int]:
        """The nodes that have pinned layers."""
        return frozenset(index for index, node in enumerate(self.nodes) if self.request.pins.get(node.node_id))

    @property
    def pinned(self) -> tuple[int, ...]:
        """The nodes that have pinned layers, in the order of these."""
        pins = self.request.pins
        return tuple(sorted(self.required, key=lambda index: pins[self.nodes[index].node_id].start))

    def promising(self) -> Iterator[tuple[Problem, tuple[int, ...]]]:
        """Of many nodes those that promise most, with their indices; then more and more of them, at last all."""
        ranked, weighed = self._by_promise(), MAX_WEIGHED
        while True:
            chosen = tuple(sorted(ranked[:weighed]))
            yield Problem(replace(self.request, candidates=tuple(self.nodes[index] for index in chosen))), chosen
            if weighed >= len(ranked):
                return
            weighed *= 2

    def _by_promise(self) -> list[int]:
        """The nodes: first the required ones and those that hold layers, then those that take a layer in least time.

        With the way to the node and back, by the layers that it can take.
        """
        room = [min(self.layers, costs.furthest(0)) for costs in self.costs]
        seconds = [
            (sum(self.layer_seconds[index]) / self.layers, 2 * self._wire_seconds(self._wire(node)))
            for index, node in enumerate(self.nodes)
        ]
        promise = [layer + way / max(layers, 0.5) for (layer, way), layers in zip(seconds, room, strict=True)]
        first = [index not in self.required and not node.held for index, node in enumerate(self.nodes)]
        return sorted(range(len(self.nodes)), key=lambda index: (first[index], promise[index], index))

    @cached_property
    def costs(self) -> list[NodeCosts]:
        return [NodeCosts.of(node, self.request) for node in self.nodes]

    @cached_property
    def layer_seconds(self) -> list[tuple[float, ...]]:
        """Of each node. One whose speed is not known is taken to be as fast as the median of those that are known."""
        known = [node.row_seconds for node in self.nodes if node.row_seconds]
        usual = tuple(map(median_high, zip(*known, strict=True)))
        if not known:
            usual = tuple(nbytes / ASSUMED_SPEED for nbytes in self.weights)
        return [node.row_seconds or usual for node in self.nodes]

    @cached_property
    def compute(self) -> Array:
        """What one row takes through each stage."""
        return _stages(self.layer_seconds, MAX_ROW_SECONDS)

    @cached_property
    def excess(self) -> Array:
        """How many layers of each stage are too many for the node's memory, or lack although they are pinned to it."""
        counts = np.zeros((len(self.nodes), self.layers + 1, self.layers + 1), np.int64)
        ends = np.arange(self.layers + 1)
        for index, node in enumerate(self.nodes):
            furthest = np.array([self.costs[index].furthest(start) for start in range(self.layers + 1)])
            counts[index] = np.maximum(0, ends[None, :] - np.maximum(furthest, ends)[:, None])
            if pinned := self.request.pins.get(node.node_id):
                counts[index] += (
                    np.maximum(0, ends - pinned.start)[:, None] + np.maximum(0, pinned.stop - ends)[None, :]
                )
        return counts

    @cached_property
    def loading(self) -> Array:
        """What it takes to load what each stage needs beyond what its node has in memory."""
        speeds = [node.load_speed for node in self.nodes if node.load_speed]
        usual = median_high(speeds) if speeds else ASSUMED_LOAD_SPEED
        anywhere = any(node.on_disk for node in self.nodes)
        seconds = [
            tuple(
                0.0
                if layer in node.held
                else nbytes / (node.load_speed or usual)
                + (nbytes / DOWNLOAD_SPEED if anywhere and layer not in node.on_disk else 0.0)
                for layer, nbytes in enumerate(self.weights)
            )
            for node in self.nodes
        ]
        stages = _stages(seconds, MAX_LOAD_SECONDS)
        return stages + np.where((stages > 0) & (stages < NEVER), int(LOAD_OVERHEAD * NANOSECONDS), 0)

    @cached_property
    def untidiness(self) -> NDArray[np.float64]:
        """One for each stage, and its bytes times its node's fill: least with few stages that are filled alike.

        Together with the latter, which are in parts of the model, one stage more never pays.
        """
        taken = np.array([node.takes for node in self.costs], np.float64)
        memory = np.array([max(node.memory, 1) for node in self.costs], np.float64)
        nbytes = np.maximum(0, taken[:, None, :] - taken[:, :, None])
        return 1 + nbytes / sum(self.request.layer_bytes) * np.minimum(1, nbytes / memory[:, None, None])

    @cached_property
    def wires(self) -> Array:
        """What one row takes from each machine to each other one."""
        ids = [*(node.node_id for node in self.nodes), COORDINATOR]
        found = {(one, other): self.request.wire(one, other) for one in ids for other in ids if one != other}
        known = sorted(self._wire_seconds(wire) for wire in found.values() if wire is not None)
        usual = median_high(known) if known else self._wire_seconds(ASSUMED_WIRE)
        seconds = [
            [
                0.0 if one == other else self._wire_seconds(wire) if (wire := found[one, other]) else usual
                for other in ids
            ]
            for one in ids
        ]
        return _nanoseconds(np.array(seconds))

    def _wire(self, node: Candidate) -> Wire:
        return self.request.wire(node.node_id, COORDINATOR) or ASSUMED_WIRE

    def _wire_seconds(self, wire: Wire) -> float:
        return wire.seconds + (self.request.row_bytes / wire.bandwidth if wire.bandwidth else 0.0)


def _stages(seconds: list[tuple[float, ...]], most: float) -> Array:
    """[node, start, end] of what each layer takes on each node, and `most` at most."""
    each = _nanoseconds(np.minimum(np.array(seconds, np.float64), most))
    ends = np.concatenate([np.zeros((len(seconds), 1), np.int64), np.cumsum(each, axis=1)], axis=1)
    stages = ends[:, None, :] - ends[:, :, None]
    starts, stops = np.indices(stages.shape[1:])
    return np.where(stops > starts, stages, NEVER)


def _nanoseconds(seconds: NDArray[np.float64]) -> Array:
    rounded: Array = np.rint(seconds * NANOSECONDS).astype(np.int64)
    return rounded
