"""What is remembered of an hour: events in words, and points of speed and load."""

from __future__ import annotations

import pytest

from core.coordinator.journal import MAX_EVENTS, MAX_POINTS, Journal
from core.interfaces.telemetry import HistoryPoint


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(clock: Clock) -> Journal:
    return Journal(clock)


def test_tokens_and_sessions_are_counted_where_they_fall(journal: Journal, clock: Clock) -> None:
    journal.sessions_changed(1)
    journal.sessions_changed(1)
    journal.count(3)
    clock.time = 1009.9
    journal.count(4)
    journal.sessions_changed(-1)
    clock.time = 1025
    journal.count(5)
    assert journal.history().points == (
        HistoryPoint(1000, 7, 2),
        HistoryPoint(1010, 0, 1),
        HistoryPoint(1020, 5, 1),
    )


def test_it_goes_on_while_nothing_happens_and_forgets_after_an_hour(journal: Journal, clock: Clock) -> None:
    journal.count(9)
    clock.time += 3600
    points = journal.history().points
    assert len(points) == MAX_POINTS
    assert sum(point.tokens for point in points) == 0
    clock.time += 10**7
    assert journal.history().points == (HistoryPoint(clock.time // 10 * 10, 0, 0),)


def test_events_are_bounded_and_not_repeated(journal: Journal, clock: Clock) -> None:
    for text in ("a", "a", "b", "a"):
        journal.note(text)
    assert [event.text for event in journal.events] == ["a", "b", "a"]
    for number in range(2 * MAX_EVENTS):
        journal.note(str(number))
    assert len(journal.events) == MAX_EVENTS
    assert journal.events[-1].at == clock.time
