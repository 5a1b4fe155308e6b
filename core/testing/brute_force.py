"""For planners that weigh time: random clusters, and the best plan for each, found by trying all.

rng = random.Random(1)
request = random_request(rng)
best = least_seconds(request)
if best is not None:
    assert seconds(planner.plan(request), request) <= 1.02 * best
"""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise

from core.interfaces.planner import CHUNK_ROWS, COORDINATOR, Candidate, Plan, PlanFor, PlanRequest, Wire

ROW_BYTES = 8192


def random_request(
    rng: random.Random,
    nodes: int | None = None,
    layers: int | None = None,
    plan_for: PlanFor | None = None,
) -> PlanRequest:
    """Unlike machines (up to 6, and up to 12 layers), some of which hold layers, on unlike wires; not all of it fits.

    Every speed is known, and every wire to the coordinator.
    """
    count = layers or rng.randint(1, 12)
    weights = [rng.choice((100, rng.randint(50, 150))) for _ in range(count)]
    sizes = [nbytes + 10 for nbytes in weights]
    ids = [f"node-{index}" for index in range(nodes or rng.randint(1, 6))]
    candidates = tuple(_random_node(rng, node_id, weights, sum(sizes)) for node_id in ids)
    ends = [COORDINATOR, *ids]
    wires = {
        (one, other): Wire(rng.choice((0.0001, 0.001, 0.005, 0.02)) * rng.uniform(0.7, 1.4), rng.choice((0, 1e6, 1e8)))
        for index, one in enumerate(ends)
        for other in ends[index + 1 :]
        if one == COORDINATOR or rng.random() < 0.8
    }
    fewest = rng.choice((1, 1, 1, min(2, len(ids), count)))
    return PlanRequest(
        layer_bytes=tuple(sizes),
        candidates=candidates,
        min_stages=fewest,
        max_stages=rng.choice((None, None, max(fewest, rng.randint(1, len(ids))))),
        weight_bytes=tuple(weights),
        plan_for=plan_for or rng.choice(list(PlanFor)),
        row_bytes=ROW_BYTES,
        wires=wires,
        pins=_random_pins(rng, ids, count),
        prompt_rows=rng.choice((0.0, 2.0, 20.0)),
    )


def _random_node(rng: random.Random, node_id: str, weights: list[int], total: int) -> Candidate:
    per_layer = rng.choice((0.001, 0.002, 0.005, 0.02)) * rng.uniform(0.7, 1.4)
    start, chunk_factor = rng.randrange(len(weights)), rng.choice((2.0, 10.0, 50.0)) * rng.uniform(0.7, 1.4)
    held = range(start, rng.randint(start, len(weights))) if rng.random() < 0.5 else range(0)
    rows = tuple(per_layer * nbytes / 100 * rng.uniform(0.9, 1.1) for nbytes in weights)
    return Candidate(
        node_id,
        memory=int(total * rng.choice((0.15, 0.3, 0.5, 0.8, 1.2)) * rng.uniform(0.8, 1.2)),
        device="cpu",
        row_seconds=rows,
        chunk_seconds=tuple(seconds * chunk_factor for seconds in rows),
        held=frozenset(held),
    )


def _random_pins(rng: random.Random, ids: list[str], layers: int) -> dict[str, range]:
    if rng.random() < 0.8:
        return {}
    start = rng.randrange(layers)
    return {rng.choice(ids): range(start, min(layers, start + rng.randint(1, 3)))}


def seconds(plan: Plan, request: PlanRequest) -> float:
    """What the plan is to make short: of one row its way through all stages and wires; or the slowest stage.

    With the rows of prompts that come with it.
    """
    nodes = {node.node_id: node for node in request.candidates}
    stages = [sum(layer_seconds(nodes[stage.node_id], request)[stage.start : stage.end]) for stage in plan.stages]
    if request.plan_for is PlanFor.THROUGHPUT:
        return max(stages)
    machines = (COORDINATOR, *(stage.node_id for stage in plan.stages), COORDINATOR)
    return sum(stages) + sum(wire_seconds(request, *ends) for ends in pairwise(machines))


def layer_seconds(node: Candidate, request: PlanRequest) -> list[float]:
    """For one row and the rows of prompts that come with it. Both must be known."""
    chunks = request.prompt_rows / CHUNK_ROWS
    return [row + chunks * chunk for row, chunk in zip(node.row_seconds, node.chunk_seconds, strict=True)]


def wire_seconds(request: PlanRequest, one: str, other: str) -> float:
    """For one row and the rows of prompts that come with it. The wire must be known."""
    wire = request.wire(one, other)
    assert wire is not None, f"nothing is known of the wire from {one!r} to {other!r}"
    chunks = request.prompt_rows / CHUNK_ROWS
    return wire.takes(request.row_bytes) + chunks * wire.takes(CHUNK_ROWS * request.row_bytes)


def least_seconds(request: PlanRequest) -> float | None:
    """What the best plan takes; None if none fits. Every order of every choice of nodes is tried with all borders,

    up to where it takes longer than the best so far.
    """
    return _TryingAll(request).best()


class _TryingAll:
    def __init__(self, request: PlanRequest) -> None:
        self._request, self._layers = request, len(request.layer_bytes)
        self._nodes = request.candidates
        self._takes = [[0, *accumulate(self._sizes(node))] for node in self._nodes]
        self._times = [[0.0, *accumulate(layer_seconds(node, request))] for node in self._nodes]
        ids = [*(node.node_id for node in self._nodes), COORDINATOR]
        self._wires = [[wire_seconds(request, one, other) for other in ids] for one in ids]
        self._is_sum = request.plan_for is PlanFor.LATENCY
        self._most = math.inf if request.max_stages is None else request.max_stages
        self._best = math.inf

    def best(self) -> float | None:
        self._extend(start=0, before=-1, used=0, so_far=0.0)
        return None if self._best == math.inf else self._best

    def _sizes(self, node: Candidate) -> list[int]:
        sizes = zip(self._request.layer_bytes, self._request.weight_bytes, strict=True)
        return [size - weight * (layer in node.pinned) for layer, (size, weight) in enumerate(sizes)]

    def _extend(self, start: int, before: int, used: int, so_far: float) -> None:
        if start == self._layers:
            self._finish(before, used, so_far)
        elif used.bit_count() < self._most:
            for node in range(len(self._nodes)):
                if not used >> node & 1:
                    self._extend_by(node, start, before, used, so_far)

    def _extend_by(self, node: int, start: int, before: int, used: int, so_far: float) -> None:
        pinned = self._request.pins.get(self._nodes[node].node_id, range(0))
        for end in range(start + 1, self._layers + 1):
            if self._takes[node][end] - self._takes[node][start] > self._nodes[node].memory:
                break
            if pinned and not (start <= pinned.start and pinned.stop <= end):
                continue
            stage = self._times[node][end] - self._times[node][start]
            total = so_far + self._wires[before][node] + stage if self._is_sum else max(so_far, stage)
            if total < self._best:
                self._extend(end, node, used | 1 << node, total)

    def _finish(self, before: int, used: int, so_far: float) -> None:
        ids = {node.node_id for index, node in enumerate(self._nodes) if used >> index & 1}
        if used.bit_count() >= self._request.min_stages and ids.issuperset(self._request.pins):
            self._best = min(self._best, so_far + self._wires[before][-1] * self._is_sum)
