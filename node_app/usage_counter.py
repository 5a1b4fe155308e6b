"""Tokens served: how many today, and how fast just now."""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

import msgspec

WINDOW = timedelta(seconds=5)


class Saved(msgspec.Struct, frozen=True):
    day: str
    tokens: int


class UsageCounter:
    """Is told, now and then, how many tokens a node has served since that began. A day begins at midnight, here."""

    def __init__(self, saved: bytes | None, now: datetime) -> None:
        """`saved` is what `save` gave an earlier process; it counts where that was today, and reads."""
        self.today = 0
        self._day = now.date()
        self._served = 0
        self._recent: deque[tuple[datetime, int]] = deque()
        try:
            earlier = msgspec.json.decode(saved or b"", type=Saved)
        except msgspec.DecodeError:
            return
        if earlier.day == self._day.isoformat():
            self.today = earlier.tokens

    def save(self) -> bytes:
        return msgspec.json.encode(Saved(self._day.isoformat(), self.today))

    def note(self, served: int, now: datetime) -> None:
        """`served` falls back to less where the node began anew."""
        new = served - self._served if served >= self._served else served
        self._served = served
        if now.date() != self._day:
            self._day, self.today = now.date(), 0
        self.today += new
        self._recent.append((now, new))
        while self._recent[0][0] <= now - WINDOW:
            self._recent.popleft()

    @property
    def per_second(self) -> float:
        return sum(tokens for _, tokens in self._recent) / WINDOW.total_seconds()
