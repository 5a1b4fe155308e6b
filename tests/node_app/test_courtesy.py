"""When a machine serves and when it gives way."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, time, timedelta

import pytest

from node_app.courtesy import QUIET, SERVE, Measurements, Verdict, decide
from node_app.settings import Hours, Limits

NOON = datetime(2025, 6, 1, 12, 0)
FREE = Measurements(battery=False, cpu=5.0, gpu=0.0, free_memory=8 * 10**9)


def test_a_free_machine_serves() -> None:
    assert decide(Limits(), FREE, NOON) == SERVE


def test_what_nobody_can_measure_is_no_reason_to_pause() -> None:
    assert decide(Limits(), replace(FREE, cpu=None, gpu=None), NOON) == SERVE


@pytest.mark.parametrize(
    ("measured", "switched_off", "reason"),
    [
        (replace(FREE, battery=True), {"pause_on_battery": False}, "battery"),
        (replace(FREE, cpu=80.0), {"cpu_percent": None}, "CPU (80%, the limit is 60%)"),
        (replace(FREE, gpu=90.0), {"gpu_percent": None}, "GPU (90%, the limit is 40%)"),
        (replace(FREE, free_memory=10**8), {"free_memory_gb": None}, "0.1 GB free, the limit is 0.5 GB"),
    ],
)
def test_each_limit_pauses_and_can_be_switched_off(
    measured: Measurements, switched_off: dict[str, None], reason: str
) -> None:
    assert reason in decide(Limits(), measured, NOON).reason
    assert decide(replace(Limits(), **switched_off), measured, NOON) == SERVE


def test_a_pause_for_use_outlasts_the_use_for_a_while() -> None:
    paused = decide(Limits(), replace(FREE, cpu=80.0), NOON)
    assert decide(Limits(), FREE, NOON + QUIET / 2, paused) == paused
    again = decide(Limits(), replace(FREE, cpu=70.0), NOON + QUIET / 2, paused)
    assert decide(Limits(), FREE, NOON + QUIET, again).reason
    assert decide(Limits(), FREE, NOON + 1.5 * QUIET, again) == SERVE


def test_a_pause_for_battery_ends_with_it() -> None:
    paused = decide(Limits(), replace(FREE, battery=True), NOON)
    assert decide(Limits(), FREE, NOON + timedelta(seconds=1), paused) == SERVE


def test_memory_that_the_pause_itself_freed_does_not_end_it() -> None:
    paused = decide(Limits(), replace(FREE, free_memory=4 * 10**8, held=4 * 10**9), NOON)
    assert paused.gave_back == 4 * 10**9
    later = NOON + 2 * QUIET
    still = decide(Limits(), replace(FREE, free_memory=44 * 10**8), later, paused)
    assert "need the memory" in still.reason
    assert still.gave_back == 4 * 10**9
    assert decide(Limits(), replace(FREE, free_memory=6 * 10**9), later + 2 * QUIET, still) == SERVE


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (Hours("22:00", "08:00"), ["22:00", "23:59", "00:00", "07:59"], ["08:00", "12:00", "21:59"]),
        (Hours("09:00", "17:30"), ["09:00", "17:29"], ["08:59", "17:30", "00:00"]),
    ],
)
def test_hours_may_pass_midnight(hours: Hours, inside: list[str], outside: list[str]) -> None:
    limits = Limits(hours=hours)
    for text in inside:
        assert decide(limits, FREE, datetime.combine(NOON, time.fromisoformat(text))) == SERVE, text
    for text in outside:
        said = decide(limits, FREE, datetime.combine(NOON, time.fromisoformat(text)))
        assert said == Verdict(f"outside its hours, {hours.start} to {hours.end}"), text
