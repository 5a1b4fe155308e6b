"""How far back what is cached for a session can be cut, and where prompts' chunks end so that it can."""

from __future__ import annotations

from dataclasses import dataclass

from core.interfaces.architecture import SNAPSHOT_TOKENS
from core.runtime.layer_cache import can_cut

MIN_TAIL = 16
"""Rows of a prompt's last chunk: where a chat goes on, its last prompt comes again up to about so many tokens."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """`truncates` as of ModelSpec; `windows` of all layers, None of those without. `snapshots`: what can't be cut back
    to any token can be to where the last snapshot was taken."""

    truncates: bool = True
    snapshots: bool = False
    windows: frozenset[int | None] = frozenset()

    def longest(self, held: int, wanted: int, snapshot: int = 0) -> int:
        """Of a session of `held` tokens, how many of the first `wanted` what is cached can be cut back to; or 0.

        `snapshot`: behind so many tokens its last snapshot was taken.
        """
        if held == wanted:
            return wanted
        if self.truncates and all(can_cut(held, wanted, window) for window in self.windows):
            return wanted
        return snapshot if self.snapshots and snapshot <= wanted else 0

    def chunk_end(self, start: int, end: int, prompt: int) -> int:
        """Where a chunk of `prompt` tokens ends that could have all of [start, end): the last one is cut in two, so
        that a snapshot is taken shortly before the prompt's end."""
        last = (prompt - MIN_TAIL) // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
        is_cut = self.snapshots and end == prompt and last > start + 1
        return last if is_cut and not (self.truncates and self._has_all(prompt)) else end

    def _has_all(self, tokens: int) -> bool:
        return all(can_cut(tokens, 0, window) for window in self.windows)

    def is_snapshot(self, rows: int, end: int) -> bool:
        """Whether one is taken behind a segment of so many rows that ends there."""
        return self.snapshots and rows > 1 and end % SNAPSHOT_TOKENS == 0


ANYWHERE = Cuts()
"""Of layers that forget any token."""
