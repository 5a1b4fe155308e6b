"""A request as arrays: what each stage that could be would cost, and each wire. All times are whole nanoseconds.

Whole numbers add up the same in any order, so that plans which are equally good are seen to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import median_high
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from core import CHUNK_ROWS, COORDINATOR, Candidate, PlanRequest, Wire
from core_plugin_planner.costs import NodeCosts

Array: TypeAlias = NDArray[np.int64]

NEVER = 2**60
"""The cost of what can't be. Seven of them still add up within 64 bits."""
VIOLATION = 2**52
"""The cost of each layer that does not fit its node, or that is not where it is pinned: more than any plan takes."""
MAX_ROW_SECONDS, MAX_LOAD_SECONDS, MAX_WIRE_SECONDS = 8.0, 256.0, 8.0
"""What a layer or a wire takes at most, so that no plan takes as much as what does not fit."""
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
            (sum(each) / self.layers, 2 * self._wire_seconds(self._wire(node)))
            for node, each in zip(self.nodes, self.serve_seconds, strict=True)
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
    def prompt_shares(self) -> list[tuple[float, ...]]:
        """Of each node: what the rows of prompts that come with one row take in each layer, or nothing.

        A node that has timed none is taken to be as much faster with prompts as the median of those that have.
        """
        per_row = [
            sum(node.chunk_seconds) / sum(node.row_seconds)
            for node in self.nodes
            if node.chunk_seconds and sum(node.row_seconds)
        ]
        if not (per_row and self.request.prompt_rows):
            return []
        usual, chunks = median_high(per_row), self.request.prompt_rows / CHUNK_ROWS
        return [
            tuple(chunks * seconds for seconds in node.chunk_seconds or [usual * row for row in rows])
            for node, rows in zip(self.nodes, self.layer_seconds, strict=True)
        ]

    @cached_property
    def as_if_known(self) -> PlanRequest:
        """With what is assumed of nodes and wires in place of what is not known of them.

        What plans for some of these nodes cost can be compared with what those for all of them do.
        """
        chunks = self.request.prompt_rows / CHUNK_ROWS
        shares = [tuple(share / chunks for share in each) for each in self.prompt_shares]
        nodes = zip(self.nodes, self.layer_seconds, shares or [node.chunk_seconds for node in self.nodes], strict=True)
        return replace(
            self.request,
            candidates=tuple(replace(node, row_seconds=rows, chunk_seconds=prompts) for node, rows, prompts in nodes),
            wires={ends: wire or self._usual_wire for ends, wire in zip(self._ends, self._pairs, strict=True)},
        )

    @cached_property
    def compute(self) -> Array:
        """What one row takes through each stage."""
        return _stages(self.layer_seconds, MAX_ROW_SECONDS)

    @property
    def serve_seconds(self) -> list[tuple[float, ...]]:
        """Of each node: what one row takes in each layer, with the rows of prompts that come with it."""
        if not self.prompt_shares:
            return self.layer_seconds
        both = zip(self.layer_seconds, self.prompt_shares, strict=True)
        return [tuple(map(sum, zip(*each, strict=True))) for each in both]

    @cached_property
    def serve(self) -> Array:
        """What one row takes through each stage, with the rows of prompts that come with it."""
        return _stages(self.serve_seconds, MAX_ROW_SECONDS)

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
        return self._by_wire(self._wire_seconds)

    @cached_property
    def serving_wires(self) -> Array:
        """What one row takes with the rows of prompts that come with it."""
        if not self.prompt_shares:
            return self.wires
        chunks, nbytes = self.request.prompt_rows / CHUNK_ROWS, CHUNK_ROWS * self.request.row_bytes
        return self._by_wire(lambda wire: self._wire_seconds(wire) + chunks * wire.takes(nbytes))

    def _by_wire(self, seconds: Callable[[Wire], float]) -> Array:
        """From each machine to each other one. A wire of which nothing is known is like the median of the others."""
        machines = len(self.nodes) + 1
        each = np.zeros((machines, machines))
        each[np.triu_indices(machines, 1)] = [seconds(wire or self._usual_wire) for wire in self._pairs]
        return _nanoseconds(each + each.T, MAX_WIRE_SECONDS)

    @cached_property
    def _usual_wire(self) -> Wire:
        known = sorted((wire for wire in self._pairs if wire is not None), key=self._wire_seconds)
        return known[len(known) // 2] if known else ASSUMED_WIRE

    @cached_property
    def _pairs(self) -> list[Wire | None]:
        """Between each two machines, the same both ways; None if nothing is known of it."""
        return [self.request.wire(one, other) for one, other in self._ends]

    @property
    def _ends(self) -> Iterator[tuple[str, str]]:
        return combinations([*(node.node_id for node in self.nodes), COORDINATOR], 2)

    def _wire(self, node: Candidate) -> Wire:
        return self.request.wire(node.node_id, COORDINATOR) or ASSUMED_WIRE

    def _wire_seconds(self, wire: Wire) -> float:
        return wire.takes(self.request.row_bytes)


def _stages(seconds: list[tuple[float, ...]], most: float) -> Array:
    """[node, start, end] of what each layer takes on each node, and `most` at most."""
    each = _nanoseconds(np.array(seconds, np.float64), most)
    ends = np.concatenate([np.zeros((len(seconds), 1), np.int64), np.cumsum(each, axis=1)], axis=1)
    stages = ends[:, None, :] - ends[:, :, None]
    starts, stops = np.indices(stages.shape[1:])
    return np.where(stops > starts, stages, NEVER)


def _nanoseconds(seconds: NDArray[np.float64], most: float) -> Array:
    """From 0 to `most`; what is no number is as much."""
    possible = np.clip(np.nan_to_num(seconds, nan=most), 0.0, most)
    rounded: Array = np.rint(possible * NANOSECONDS).astype(np.int64)
    return rounded
