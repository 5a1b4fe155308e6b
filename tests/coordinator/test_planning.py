"""What a planner plans is a plan, or is refused with the planner's name."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from trio.testing import MockClock

from core.coordinator.planning import PLAN_THREADS, Planning, node_memory, planned
from core.coordinator.settings import CoordinatorSettings
from core.errors import PlanError
from core.interfaces.checkpoint import Source
from core.interfaces.planner import Candidate, Plan, Planner, PlanRequest, StagePlan

REQUEST = PlanRequest((10,) * 6, (Candidate("a", 100, "cpu"), Candidate("b", 100, "cpu")), max_stages=2)


class Fixed(Planner):
    name = "fixed"

    def __init__(self, *stages: tuple[str, int, int], left_out: str = "") -> None:
        told = ((left_out, "it is small"),) if left_out else ()
        self._plan = Plan(tuple(StagePlan(*stage, nbytes=10) for stage in stages), told)

    def plan(self, request: PlanRequest) -> Plan:
        return self._plan


@pytest.mark.parametrize(
    "planner",
    [
        Fixed(("a", 0, 2), ("b", 2, 6)),
        Fixed(("b", 0, 6), left_out="a"),
        Fixed(("b", 0, 6)),
        Fixed(("a", 0, 1), ("b", 1, 5), ("a", 5, 6)),
    ],
)
def test_each_layer_once_in_order_is_a_plan(planner: Fixed) -> None:
    assert planned(planner, REQUEST) is planner.plan(REQUEST)


@pytest.mark.parametrize(
    ("planner", "fault"),
    [
        (Fixed(), "layers [0, 6) are on no node"),
        (Fixed(("a", 0, 3)), "layers [3, 6) are on no node"),
        (Fixed(("a", 0, 2), ("b", 3, 6)), "'b' is given layers [3, 6) where [2, ...) follow"),
        (Fixed(("a", 0, 3), ("b", 2, 6)), "'b' is given layers [2, 6) where [3, ...) follow"),
        (Fixed(("a", 0, 3), ("b", 3, 7)), "'b' is given layers [3, 7) of 6"),
        (Fixed(("a", 0, 6), ("b", 6, 6)), "'b' is given layers [6, 6)"),
        (Fixed(("a", 0, 3), ("c", 3, 6)), "'c' is no candidate"),
        (Fixed(("a", 0, 6), left_out="c"), "'c' is no candidate"),
        (Fixed(("a", 0, 6), left_out="a"), "'a' is left out, and told of twice"),
        (Fixed(("a", 0, 6.0)), "'a' is given layers [0, 6.0), which are no whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_anything_else_is_refused(planner: Fixed, fault: str) -> None:
    with pytest.raises(PlanError, match="the planner 'fixed' made a plan that can't be") as caught:
        planned(planner, REQUEST)
    assert fault in caught.value.message


def test_more_than_a_node_offers_is_no_plan() -> None:
    small = Candidate("a", 59, "cpu", pinned=frozenset({1}))
    request = replace(REQUEST, candidates=(small,), weight_bytes=(8,) * 6)
    assert planned(Fixed(("a", 0, 6)), request)
    with pytest.raises(PlanError, match="'a' is given layers of 60 bytes, and offers 59"):
        planned(Fixed(("a", 0, 6)), replace(request, candidates=(replace(small, pinned=frozenset()),)))


@pytest.mark.parametrize("words", [{"notes": ("quick", 7)}, {"left_out": (("b", None),)}])
def test_what_is_said_of_a_plan_has_to_be_text(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Fixed(("a", 0, 6))
    monkeypatch.setattr(planner, "_plan", replace(planner.plan(REQUEST), **words))
    with pytest.raises(PlanError, match="is no text"):
        planned(planner, REQUEST)


def test_what_is_no_plan_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixed, "plan", lambda *_: None)
    with pytest.raises(PlanError, match="it is None, and no Plan"):
        planned(Fixed(), REQUEST)


@pytest.mark.parametrize("failure", [KeyError("a"), SystemExit(3)], ids=repr)
def test_whatever_a_planner_raises_is_no_plan(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Plan:
        raise failure

    monkeypatch.setattr(Fixed, "plan", fail)
    with pytest.raises(PlanError, match="the planner 'fixed' failed"):
        planned(Fixed(), REQUEST)


@pytest.mark.parametrize(("least", "most"), [(2, None), (1, 0)])
def test_the_bounds_on_the_number_of_nodes_are_held(least: int, most: int | None) -> None:
    request = PlanRequest(REQUEST.layer_bytes, REQUEST.candidates, least, most)
    with pytest.raises(PlanError, match="1 nodes are used"):
        planned(Fixed(("a", 0, 6)), request)


@pytest.mark.parametrize(("cap", "memory"), [(None, 900), (500, 500), (950, 900), (2000, 900)])
def test_a_cap_never_takes_the_margin_away(cap: int | None, memory: int) -> None:
    assert node_memory(1000, cap) == memory


async def test_a_planner_that_never_returns_is_given_up_and_keeps_a_few_threads(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Stuck(Fixed):
        def plan(self, request: PlanRequest) -> Plan:
            release.wait(300)
            return super().plan(request)

    monkeypatch.setattr(Planning, "_request", lambda *_: REQUEST)
    nobody, settings = cast(Any, None), CoordinatorSettings(Source("tiny"), "tiny", min_nodes=0)
    planning = Planning(settings, Stuck(("a", 0, 6)), *[nobody] * 3, 0, *[nobody] * 4)
    try:
        for _ in range(PLAN_THREADS + 1):
            with pytest.raises(PlanError, match="the planner 'fixed' gave no plan within 60 s"):
                await planning.plan([])
        assert planning.threads.borrowed_tokens == PLAN_THREADS
    finally:
        release.set()
