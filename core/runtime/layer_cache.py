"""One layer's keys and values of one session, in growing blocks; a layer with a window forgets what slid out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import StageError
from core.interfaces.architecture import SNAPSHOT_TOKENS
from core.runtime.kv_packing import AS_THEY_ARE, KVPacking

BLOCK = 256
"""A cache's capacity in tokens is a multiple of this."""
_WINDOW_BLOCK = 64
"""The same of one that has all its window asks for."""
ROLLBACK = 128
"""How many tokens a session can go back at least, whatever its layers' windows."""


def capacity(tokens: int) -> int:
    """For how many tokens a cache that holds, or once held, `tokens` has memory: at most a block or a quarter more.

    It grows by a block, or by a quarter of the last power of two.
    """
    step = _step(tokens)
    return -(-tokens // step) * step


def longest_within(tokens: int) -> int:
    """How many tokens a cache can hold that has memory for `tokens`: the largest with a `capacity` within it."""
    step = _step(tokens)
    return tokens // step * step


def window_capacity(window: int) -> int:
    """For how many tokens a layer with a window has memory at most: twice ROLLBACK besides, so that it rarely moves
    what it holds."""
    return -(-(window + 2 * ROLLBACK) // _WINDOW_BLOCK) * _WINDOW_BLOCK


def held_tokens(tokens: int, window: int | None) -> int:
    """For how many tokens a layer has memory whose session has `tokens`."""
    return capacity(tokens) if window is None else min(capacity(tokens), window_capacity(window))


def can_cut(held: int, length: int, window: int | None) -> bool:
    """Whether a layer that holds `held` tokens is sure to hold what the first `length` of them need.

    A few tokens more may have been held in between, which were taken back.
    """
    if window is None or held + ROLLBACK <= window_capacity(window):
        return True
    return held - length <= ROLLBACK // 2


def _step(tokens: int) -> int:
    return max(BLOCK, 1 << max(0, (tokens - 1).bit_length() - 3))


class LayerCache:
    """Keys and values of a session's tokens from `first` on, in blocks [kv_heads, capacity, any width].

    With a window, what rows behind the last chunk see that ended at a multiple of SNAPSHOT_TOKENS stays as well: before
    it slides out of the blocks, it becomes a snapshot.
    """

    def __init__(self, packing: KVPacking = AS_THEY_ARE, window: int | None = None) -> None:
        self.first = 0
        self.window = window
        self._packing = packing
        self._blocks: list[Tensor] = []
        """Those of the keys, and as many of the values."""
        self._mark = 0
        """Where the last such chunk ended."""
        self._snapshot: list[Tensor] = []
        """Of each block the last rows before the mark; empty while the blocks have them."""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (*self._blocks, *self._snapshot))

    def goes_back_to(self, position: int) -> bool:
        """Whether all that a row at `position` attends to before it is held."""
        return self._has(position) or (bool(self._snapshot) and position == self._mark)

    def _has(self, position: int) -> bool:
        """The same of the blocks alone."""
        return self.first == 0 or self.window is None or position >= self.first + self.window - 1

    def append(self, start: int, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Writes k, v [rows, kv_heads, width] from `start` on; returns what they attend to, [kv_heads, tokens, width].

        That is all up to their end, but what the first of them does not see within `window`.
        """
        self.window = window
        self._go_to(start)
        end, pack = start + len(k), self._packing.pack
        new = [*pack(k.transpose(0, 1)), *pack(v.transpose(0, 1))]
        if window is not None and end - self.first > window_capacity(window):
            seen = self._slide(start, end, new, window)
        else:
            seen = self._write(start, end, new)
        if window is not None and len(k) > 1 and end % SNAPSHOT_TOKENS == 0:
            self._mark, self._snapshot = end, []
        return self._unpacked(seen, k.dtype)

    def prefix(self, length: int) -> LayerCache:
        """A cache of its own with the first `length` tokens. Raises StageError if what they need is forgotten."""
        if not self.goes_back_to(length):
            raise forgotten(length)
        copied = LayerCache(self._packing, self.window)
        from_blocks = self._has(length)
        copied.first = self.first if from_blocks else length - self._snapshot[0].shape[1]
        held = length - copied.first
        for block in self._blocks if from_blocks else self._snapshot:
            own = _block(block, held_tokens(length, self.window))
            own[:, :held] = block[:, :held]
            copied._blocks.append(own)
        if self._mark <= length:
            copied._mark = self._mark
            copied._snapshot = [rows.clone() for rows in self._snapshot] if from_blocks else []
        return copied

    def _go_to(self, start: int) -> None:
        """Forgets what is from there on. Raises StageError if what comes before is forgotten."""
        if start == 0:
            self.first, self._mark, self._snapshot = 0, 0, []
        elif not self.goes_back_to(start):
            raise forgotten(start)
        elif not self._has(start):
            for block, rows in zip(self._blocks, self._snapshot, strict=True):
                block[:, : rows.shape[1]] = rows
            self.first = start - self._snapshot[0].shape[1]
        elif start < self._mark:
            self._mark, self._snapshot = 0, []

    def _write(self, start: int, end: int, new: Sequence[Tensor]) -> list[Tensor]:
        """Appends; returns what the new ones see."""
        self._blocks = self._roomy(new, start, end)
        at, to = start - self.first, end - self.first
        for block, rows in zip(self._blocks, new, strict=True):
            block.narrow(1, at, to - at).copy_(rows)
        seen = 0 if self.window is None else max(0, at + 1 - self.window)
        return [block.narrow(1, seen, to - seen) for block in self._blocks]

    def _unpacked(self, held: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        of_keys = len(held) // 2
        return self._packing.unpack(held[:of_keys], dtype), self._packing.unpack(held[of_keys:], dtype)

    def _roomy(self, like: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
        """The blocks, or larger ones with what they hold up to `start`, with room for the tokens up to `end`."""
        if self._blocks and end - self.first <= self._blocks[0].shape[1]:
            return self._blocks
        larger = [_block(each, held_tokens(end, self.window)) for each in like]
        for block, old in zip(larger, self._blocks, strict=False):
            block[:, : start - self.first] = old[:, : start - self.first]
        return larger

    def _slide(self, start: int, end: int, new: Sequence[Tensor], window: int) -> list[Tensor]:
        """Appends, and forgets all but the last tokens: the window, and as many as a session may go back.

        Returns what the new ones see.
        """
        kept, seen = max(self.first, end - window - ROLLBACK), max(self.first, start + 1 - window)
        low = min(kept, seen)
        marked = max(self.first, self._mark + 1 - window)
        if self._mark > 0 and not self._snapshot and kept > marked:
            at = slice(marked - self.first, self._mark - self.first)
            self._snapshot = [block[:, at].clone() for block in self._blocks]
        before = [block[:, low - self.first : start - self.first] for block in self._blocks]
        held = [torch.cat(both, dim=1) for both in zip(before, new, strict=True)] if before else list(new)
        size = window_capacity(window)
        if not self._blocks or self._blocks[0].shape[1] < size:
            self._blocks = [_block(each, size) for each in new]
        for block, rows in zip(self._blocks, held, strict=True):
            block[:, : end - kept] = rows[:, kept - low :]
        self.first = kept
        return [rows[:, seen - low :] for rows in held]


def _block(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(like.shape[0], tokens, like.shape[2])


def forgotten(position: int) -> StageError:
    return StageError(
        f"these layers can't go back to position {position}",
        "what slid out of their windows is forgotten",
        "start the session again from its first token",
    )
