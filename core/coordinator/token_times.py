"""What a token of one stream takes: all of it, and the coordinator's own part."""

from __future__ import annotations

import statistics
from collections import deque

STEPS = 64
"""Of the last decode steps with one row, as many count."""
MIN_STEPS = 16


class TokenTimes:
    """Lives in trio. Medians of late: what a busy machine adds now and then says nothing of a plan."""

    def __init__(self) -> None:
        self._head = 0.0
        self._heads = deque[float](maxlen=STEPS)
        self._tokens = deque[float](maxlen=STEPS)

    def begin(self, head: float) -> None:
        """So many seconds of embedding and head were found before anybody was served."""
        self._head = head

    def route_began(self) -> None:
        self._tokens.clear()

    def note(self, seconds: float, on_route: float) -> None:
        """One row was decoded while nobody else was served: in all, and between its leaving and its coming back."""
        self._tokens.append(seconds)
        self._heads.append(seconds - on_route)

    @property
    def head(self) -> float:
        return statistics.median(self._heads) if len(self._heads) >= MIN_STEPS else self._head

    @property
    def token(self) -> float:
        """On the newest route; 0 before there were enough."""
        return statistics.median(self._tokens) if len(self._tokens) >= MIN_STEPS else 0.0
