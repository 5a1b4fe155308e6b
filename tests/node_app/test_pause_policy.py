"""When a machine serves and when it gives way."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, time, timedelta

import pytest

from node_app import machine
from node_app.machine import WINDOW, Mean, Meter
from node_app.pause_policy import QUIET, SERVE, SERVE_ALTHOUGH_USED, Measurements, Verdict, decide
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
        (replace(FREE, cpu=80.0), {"cpu_percent": None}, "CPU (over 75%); back after 5 quiet minutes"),
        (replace(FREE, gpu=90.0), {"gpu_percent": None}, "GPU (over 50%); back after 5 quiet minutes"),
        (replace(FREE, free_memory=10**8), {"free_memory_gb": None}, "need the memory; back when 0.5 GB are free"),
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
    again = decide(Limits(), replace(FREE, cpu=80.0), NOON + QUIET / 2, paused)
    assert decide(Limits(), FREE, NOON + QUIET, again).reason
    assert decide(Limits(), FREE, NOON + 1.5 * QUIET, again) == SERVE


def test_a_load_around_the_limit_pauses_once_and_gives_one_reason() -> None:
    """The CPU goes over and under each second, and the GPU over each third: for an hour, and for QUIET after it."""
    verdict, said = SERVE, []
    for second in range(3600):
        measured = replace(FREE, cpu=70.0 + 10 * (second % 2), gpu=90.0 * (second % 3 == 0))
        verdict = decide(Limits(), measured, NOON + timedelta(seconds=second), verdict)
        said.append(verdict.reason)
    assert said[0].startswith("other programs use the GPU")
    assert len(set(said)) == 1
    end = NOON + timedelta(hours=1)
    assert decide(Limits(), FREE, end + QUIET / 2, verdict).reason == said[0]
    assert decide(Limits(), FREE, end + QUIET, verdict) == SERVE


def test_browsing_on_two_cores_is_no_reason_and_a_build_is() -> None:
    """A page that takes both cores for ten seconds every half minute, and a build that takes them for good."""
    browsing, build = Mean(WINDOW), Mean(WINDOW)
    for second in range(300):
        browsing.add(100.0 if second % 30 < 10 else 15.0)
        build.add(99.0)
        assert decide(Limits(), replace(FREE, cpu=browsing.value), NOON) == SERVE, second
    assert decide(Limits(), replace(FREE, cpu=build.value), NOON).reason


def test_a_mean_is_known_once_its_window_is_full_and_forgets_what_is_older() -> None:
    mean = Mean(3)
    seen = []
    for value in (9.0, None, 3.0, 6.0, 0.0):
        mean.add(value)
        seen.append(mean.value)
    assert seen == [None, None, None, None, 3.0]


def test_what_the_node_computes_itself_is_no_use_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cores all are busy, and three of them with this process."""
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda: 100.0)
    monkeypatch.setattr(machine.psutil.Process, "cpu_percent", lambda process: 300.0)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    meter = Meter(lambda: None)
    measured = [meter.measure(held=0) for _ in range(WINDOW)]
    assert [one.cpu for one in measured] == [None] * (WINDOW - 1) + [25.0]
    assert measured[-1].gpu is None


def test_a_user_may_end_a_pause_for_use_and_the_next_use_is_new() -> None:
    used = replace(FREE, cpu=80.0)
    excused = decide(Limits(), used, NOON, SERVE_ALTHOUGH_USED)
    assert excused.reason == ""
    assert decide(Limits(), used, NOON + QUIET, excused).reason == ""
    assert decide(Limits(), FREE, NOON + QUIET, excused) == SERVE
    assert decide(Limits(), used, NOON + QUIET, SERVE).reason
    assert "battery" in decide(Limits(), replace(used, battery=True), NOON, excused).reason
    assert "memory" in decide(Limits(), replace(used, free_memory=10**8), NOON, excused).reason


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
