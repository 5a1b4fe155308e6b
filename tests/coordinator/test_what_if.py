"""What other machines than those that are there would bring, by the planner that makes the plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from core.coordinator.what_if import what_if
from core.errors import RequestError
from core.interfaces.planner import Candidate, PlanRequest
from core.plugins import PluginHost

GB = 10**9
LAYERS = 4


@pytest.fixture(scope="module")
def planning() -> Any:
    planner = PluginHost.installed().planners.get("measured")
    return SimpleNamespace(planner=planner, threads=trio.CapacityLimiter(1))


def candidate(name: str, gigabytes: float, milliseconds: float) -> Candidate:
    return Candidate(name, int(gigabytes * GB), "cpu", row_seconds=(milliseconds / 1000,) * LAYERS)


REQUEST = PlanRequest(
    layer_bytes=(GB,) * LAYERS,
    candidates=(candidate("fast", 2.5, 1), candidate("slow", 2.5, 9)),
    weight_bytes=(GB,) * LAYERS,
    row_bytes=8192,
)


async def test_a_machine_that_is_needed_is_missed(planning: Any) -> None:
    answer = await what_if(planning, REQUEST, ["slow"], [])
    assert answer.stages == ()
    assert "does not fit" in answer.message


async def test_one_more_machine_gets_layers_where_others_lack_the_room(planning: Any) -> None:
    answer = await what_if(planning, REQUEST, ["slow"], [3 * GB])
    assert {stage.node_id for stage in answer.stages} == {"fast", "new-1"}
    assert sum(stage.end - stage.start for stage in answer.stages) == LAYERS


async def test_what_it_brings_is_said_in_time(planning: Any) -> None:
    faster = PlanRequest(
        REQUEST.layer_bytes, (*REQUEST.candidates, candidate("twin", 2.5, 1)), weight_bytes=REQUEST.weight_bytes
    )
    answer = await what_if(planning, faster, ["twin"], [])
    now, then = answer.token_seconds
    assert 0 < now < then
    assert "ms instead of" in answer.message


async def test_a_machine_that_is_not_there_is_named(planning: Any) -> None:
    with pytest.raises(RequestError, match="there is no node 'nobody'") as caught:
        await what_if(planning, REQUEST, ["nobody"], [])
    assert caught.value.param == "without"
