"""What steps and batches have taken so far, and what follows from it: how long a prompt's chunk may be."""

from __future__ import annotations

import time
from collections.abc import Sequence

CHUNK_SHARE = 0.75
"""Of a decode step's time: what a chunk may take of a stage, where others decode meanwhile."""
_WEIGHT = 0.2
"""Of the newest batch in an average."""


class Average:
    """An exponential moving average; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else (1 - _WEIGHT) * self.value + _WEIGHT * value


class Clock:
    """When a session came, and how its steps follow each other."""

    def __init__(self) -> None:
        self.began = self._stepped = self._told = time.monotonic()
        self.steps = 0
        self.rate = Average()
        """Tokens per second."""

    def step(self) -> float:
        """Seconds since the last step, or since it came."""
        now = time.monotonic()
        gap, self._stepped = now - self._stepped, now
        self.steps += 1
        return gap

    def due(self, seconds: float) -> bool:
        """Whether so much time has passed since this last was true."""
        if self._stepped - self._told < seconds:
            return False
        self._told = self._stepped
        return True


class ChunkSizing:
    """Compute times of the slowest stage, in microseconds: per row of a chunk, and per decode step."""

    def __init__(self, min_rows: int, max_rows: int) -> None:
        """The bounds of one prompt's chunk: others' decode steps pass between two chunks."""
        self._min_rows = min_rows
        self._max_rows = max_rows
        self._row = Average()
        self._step = Average()

    def note(self, rows: int, decode: bool, compute_us: Sequence[int]) -> None:
        slowest = max(compute_us, default=0)
        if decode:
            self._step.add(slowest)
        elif rows >= self._min_rows:
            self._row.add(slowest / rows)

    def chunk_rows(self, *, others_decode: bool) -> int:
        """How many rows of a prompt the next batch takes: few, where the decode steps of others wait for them."""
        if not others_decode:
            return self._max_rows
        rows = 4 * self._min_rows
        if self._row.value and self._step.value:
            rows = int(CHUNK_SHARE * self._step.value / self._row.value)
        return min(self._max_rows, max(self._min_rows, rows))
