"""What plans are predicted to bring, and when one is so much better that it takes the place of another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from core.coordinator.prediction import Prediction, gain, predict, with_prompts
from core.interfaces.planner import COORDINATOR, Candidate, Plan, PlanFor, PlanRequest, StagePlan, Wire

GB = 10**9


def caches(token_bytes: int) -> Callable[[range], Callable[[int], int]]:
    """Of which each token takes so many bytes in every layer."""
    return lambda layers: lambda tokens: tokens * len(layers) * token_bytes


def test_a_token_takes_what_the_stages_read_and_the_links_cost() -> None:
    nodes = [
        Candidate("near", 10 * GB, "cpu", row_seconds=(0.1,) * 4),
        Candidate("far", 20 * GB, "cpu", row_seconds=(0.05,) * 4),
    ]
    wires = {(COORDINATOR, "near"): Wire(0.001), (COORDINATOR, "far"): Wire(0.005, bandwidth=1e6)}
    request = PlanRequest((GB,) * 4, tuple(nodes), weight_bytes=(GB,) * 4, row_bytes=1000, wires=wires)
    plan = Plan((StagePlan("near", 0, 1, GB), StagePlan("far", 1, 4, 3 * GB)))
    found = predict(plan, request, caches(1000), longest=10**9)
    assert found.token_seconds == pytest.approx(0.1 + 0.15 + 0.001 + (0.005 + 0.001) * 2)
    assert found.context == min(9 * GB // 1000, 17 * GB // 3000)
    headed = predict(plan, replace(request, head_seconds=0.03), caches(1000), longest=10**9)
    assert headed.token_seconds == pytest.approx(found.token_seconds + 0.03)


def test_the_prompt_that_comes_with_a_token_counts() -> None:
    quick = Candidate("a", GB, "cpu", row_seconds=(0.01,), chunk_seconds=(2.56,))
    request = PlanRequest((1,), (quick,), weight_bytes=(1,), row_bytes=1000, prompt_rows=2.0)
    request = replace(request, wires={(COORDINATOR, "a"): Wire(0.0, bandwidth=1e6)})
    plan = Plan((StagePlan("a", 0, 1, 1),))
    alone = predict(plan, request, caches(0), longest=100)
    assert alone == Prediction(pytest.approx(0.01 + 2 * 0.001), 100, 0.01)
    found = with_prompts(alone, plan, request)
    assert found.prompt_seconds == pytest.approx(2 * (0.01 + 2 * 0.001))
    assert found.stage_seconds == pytest.approx(0.01 + 2 * 0.01)
    slower = replace(found, prompt_seconds=2 * found.prompt_seconds)
    assert "a token with its prompt is predicted to take 36 ms instead of 60" in gain(found, slower)


def test_a_node_whose_speed_is_not_known_makes_no_plan_faster() -> None:
    nodes = [Candidate("a", GB, "cpu")]
    request = PlanRequest((GB // 2,), tuple(nodes), weight_bytes=(GB // 2,))
    found = predict(Plan((StagePlan("a", 0, 1, GB // 2),)), request, caches(0), longest=4096)
    assert found == Prediction(0.0, 4096)
    assert gain(found, Prediction(0.5, 4096)) == ""


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (Prediction(0.084, 1000), "a token is predicted to take 84 ms instead of 100"),
        (Prediction(0.086, 1000), ""),
        (Prediction(0.100, 1500), "room for 1500 tokens of context instead of 1000"),
        (Prediction(0.100, 1400), ""),
        (Prediction(0.050, 600), ""),
        (Prediction(0.200, 9000), ""),
    ],
    ids=["faster", "hardly faster", "longer", "hardly longer", "faster with less room", "longer and slower"],
)
def test_a_plan_has_to_be_so_much_better(new: Prediction, reason: str) -> None:
    assert reason in gain(new, Prediction(0.100, 1000))
    assert bool(gain(new, Prediction(0.100, 1000))) is bool(reason)


def test_what_measuring_may_be_off_by_moves_no_layers() -> None:
    assert gain(Prediction(0.0005, 1000), Prediction(0.002, 1000)) == ""


def test_of_two_plans_at_most_one_is_better_than_the_other() -> None:
    kinds = [Prediction(seconds, context) for seconds in (0.0, 0.01, 0.02, 0.1, 0.11) for context in (0, 100, 140, 900)]
    for one, other in itertools.permutations(kinds, 2):
        assert not (gain(one, other) and gain(other, one)), (one, other)


def test_for_throughput_the_slowest_stage_is_compared() -> None:
    nodes = [
        Candidate("quick", GB, "cpu", row_seconds=(0.01,) * 4),
        Candidate("slow", GB, "cpu", row_seconds=(0.05,) * 4),
    ]
    request = PlanRequest((1,) * 4, tuple(nodes), weight_bytes=(1,) * 4)
    one = predict(Plan((StagePlan("quick", 0, 4, 4),)), request, caches(0), longest=100)
    two = predict(Plan((StagePlan("quick", 0, 3, 3), StagePlan("slow", 3, 4, 1))), request, caches(0), longest=100)
    assert (one.stage_seconds, two.stage_seconds) == (pytest.approx(0.04), pytest.approx(0.05))
    assert gain(one, two, PlanFor.THROUGHPUT) == "the slowest stage is predicted to take 40 ms instead of 50"
    assert gain(two, one, PlanFor.THROUGHPUT) == ""
