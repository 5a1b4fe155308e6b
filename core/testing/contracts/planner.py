"""The contract of planners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import pytest

from core.coordinator.planning import planned
from core.errors import PlanError
from core.interfaces.planner import Candidate, Planner, PlanRequest


def _request(
    memories: Sequence[int],
    layers: Sequence[int],
    min_stages: int = 1,
    max_stages: int | None = None,
    *,
    held: Mapping[int, range] = MappingProxyType({}),
    pinned: bool = False,
) -> PlanRequest:
    """Layers of so many bytes, 8 in 10 of them weights; and nodes, of which some hold layers, pinned or not."""
    ranges = [frozenset(held.get(index, ())) for index in range(len(memories))]
    candidates = tuple(
        Candidate(f"node-{index}", memory, "cpu", held=kept, pinned=kept if pinned else frozenset())
        for index, (memory, kept) in enumerate(zip(memories, ranges, strict=True))
    )
    weights = tuple(size * 8 // 10 for size in layers)
    return PlanRequest(tuple(layers), candidates, min_stages, max_stages, weights)


class PlannerContract:
    """The contract of `core.Planner`. A subclass named Test... has a fixture `planner` that gives one.

    Needs pytest. What nodes hold, and haste, a planner may leave out of account; what is pinned it may not: it has
    layers where `PlanRequest.pins` says, or refuses. A planner for which the order of joining decides sets
    `joining_decides`.
    """

    joining_decides: ClassVar[bool] = True

    REQUESTS = (
        _request([40], [10] * 4),
        _request([20, 30, 20], [5, 10, 5, 10, 5]),
        _request([60, 60, 60], [10] * 6, min_stages=2),
        _request([15, 40, 20], [10] * 5, max_stages=2),
        _request([25, 25, 25], [10] * 6, held={0: range(0, 2), 2: range(4, 6)}),
        _request([30, 30], [10] * 6, held={0: range(1, 4)}, pinned=True),
        _request([8, 9], [10] * 8, held={0: range(0, 4), 1: range(4, 8)}, pinned=True),
    )
    """The layers fit, also where the nodes keep the order in which they joined."""

    @pytest.fixture
    def planner(self) -> Planner:
        raise NotImplementedError("give a fixture `planner`")

    @pytest.mark.parametrize("in_haste", [False, True])
    @pytest.mark.parametrize("request_", REQUESTS)
    def test_each_layer_is_planned_once_and_fits(self, planner: Planner, request_: PlanRequest, in_haste: bool) -> None:
        """And the same request gets the same plan."""
        asked = replace(request_, in_haste=in_haste)
        plan = planned(planner, asked)
        nodes = {candidate.node_id: candidate for candidate in asked.candidates}
        for stage in plan.stages:
            node, layers = nodes[stage.node_id], range(stage.start, stage.end)
            taken = sum(asked.layer_bytes[i] - asked.weight_bytes[i] * (i in node.pinned) for i in layers)
            assert stage.nbytes == taken <= node.memory
        assert planned(planner, asked) == plan

    @pytest.mark.parametrize("request_", REQUESTS)
    def test_the_order_of_joining_decides_nothing(self, planner: Planner, request_: PlanRequest) -> None:
        if self.joining_decides:
            pytest.skip("it decides, says the planner")
        backwards = replace(request_, candidates=request_.candidates[::-1])
        assert planned(planner, backwards).stages == planned(planner, request_).stages

    @pytest.mark.parametrize("pins", [{"node-1": range(0, 2)}, {"node-2": range(1, 3), "node-0": range(4, 6)}])
    def test_layers_are_where_they_are_pinned_or_it_is_refused(
        self, planner: Planner, pins: Mapping[str, range]
    ) -> None:
        asked = replace(_request([60, 60, 60], [10] * 6), pins=pins)
        try:
            plan = planned(planner, asked)
        except PlanError:
            return
        held = {stage.node_id: range(stage.start, stage.end) for stage in plan.stages}
        assert all(set(layers) <= set(held[node_id]) for node_id, layers in pins.items())

    @pytest.mark.parametrize("in_haste", [False, True])
    def test_layers_that_do_not_fit_are_refused_with_the_bytes_that_are_missing(
        self, planner: Planner, in_haste: bool
    ) -> None:
        asked = replace(_request([8, 8], [10] * 8, held={0: range(0, 4)}, pinned=True), in_haste=in_haste)
        with pytest.raises(PlanError) as caught:
            planner.plan(asked)
        assert caught.value.missing_bytes > 0
