"""What happened to the cluster lately, in words for its people; and how fast and how busy it was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from core.interfaces.telemetry import ClusterEvent, History, HistoryPoint

MAX_EVENTS = 30
POINT_SECONDS = 10
MAX_POINTS = 360
"""An hour."""


class Journal:
    """Lives in trio. `now` tells seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._points: deque[HistoryPoint] = deque(maxlen=MAX_POINTS)
        self._sessions = 0

    @property
    def events(self) -> tuple[ClusterEvent, ...]:
        return tuple(self._events)

    def note(self, text: str) -> None:
        """What is said again at once is one event."""
        if not (self._events and self._events[-1].text == text):
            self._events.append(ClusterEvent(self._now(), text))

    def count(self, tokens: int) -> None:
        """So many were decoded just now."""
        last = self._present()
        self._points[-1] = HistoryPoint(last.at, last.tokens + tokens, last.sessions)

    def sessions_changed(self, by: int) -> None:
        last = self._present()
        self._sessions += by
        self._points[-1] = HistoryPoint(last.at, last.tokens, max(last.sessions, self._sessions))

    def history(self) -> History:
        self._present()
        return History(POINT_SECONDS, tuple(self._points))

    def _present(self) -> HistoryPoint:
        """The last point, which is the present one from now on."""
        begun = self._now() // POINT_SECONDS * POINT_SECONDS
        if not self._points or begun - self._points[-1].at > MAX_POINTS * POINT_SECONDS:
            self._points.clear()
            self._points.append(HistoryPoint(begun, 0, self._sessions))
        while (last := self._points[-1]).at < begun:
            self._points.append(HistoryPoint(last.at + POINT_SECONDS, 0, self._sessions))
        return last
