"""One layer's keys and values of one session, in growing blocks; a layer with a window forgets what slid out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import StageError
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
    """Keys and values of a session's tokens from `first` on, in blocks [kv_heads, capacity, any width]."""

    def __init__(self, packing: KVPacking = AS_THEY_ARE, window: int | None = None) -> None:
        self.first = 0
        self.window = window
        self._packing = packing
        self._blocks: list[Tensor] = []
        """Those of the keys, and as many of the values."""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def goes_back_to(self, position: int) -> bool:
        """Whether all that a row at `position` attends to before it is held."""
        return self.first == 0 or self.window is None or position >= self.first + self.window - 1

    def append(self, start: int, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Writes k, v [rows, kv_heads, width] from `start` on; returns what they attend to, [kv_heads, tokens, width].

        That is all up to their end, but what the first of them does not see within `window`.
        """
        self.window = window
        if start == 0:
            self.first = 0
        end, pack = start + len(k), self._packing.pack
        new = [*pack(k.transpose(0, 1)), *pack(v.transpose(0, 1))]
        if window is not None and end - self.first > window_capacity(window):
            return self._unpacked(self._slide(start, end, new, window), k.dtype)
        self._blocks = self._roomy(new, start, end)
        at, rows = start - self.first, len(k)
        for block, written in zip(self._blocks, new, strict=True):
            block.narrow(1, at, rows).copy_(written)
        seen = 0 if window is None else max(0, start + 1 - window - self.first)
        return self._unpacked([block.narrow(1, seen, at + rows - seen) for block in self._blocks], k.dtype)

    def prefix(self, length: int) -> LayerCache:
        """A cache of its own with the first `length` tokens. Raises StageError if what they need is forgotten."""
        if not self.goes_back_to(length):
            raise forgotten(length)
        copied = LayerCache(self._packing, self.window)
        copied.first, held = self.first, length - self.first
        for block in self._blocks:
            own = _block(block, held_tokens(length, self.window))
            own[:, :held] = block[:, :held]
            copied._blocks.append(own)
        return copied

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
