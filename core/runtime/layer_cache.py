"""One layer's keys and values of one session, in growing blocks; a layer with a window forgets what slid out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import StageError

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
    """Keys and values, [kv_heads, capacity, width] each, of a session's tokens from `first` on."""

    def __init__(self, window: int | None = None) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.first = 0
        self.window = window

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (self.keys, self.values) if block is not None)

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
        end, k, v = start + len(k), k.transpose(0, 1), v.transpose(0, 1)
        if window is not None and end - self.first > window_capacity(window):
            return self._slide(start, end, k, v, window)
        keys = self.keys = self._room(self.keys, k, start, end)
        values = self.values = self._room(self.values, v, start, end)
        at, rows = start - self.first, k.shape[1]
        keys.narrow(1, at, rows).copy_(k)
        values.narrow(1, at, rows).copy_(v)
        seen = 0 if window is None else max(0, start + 1 - window - self.first)
        return keys.narrow(1, seen, at + rows - seen), values.narrow(1, seen, at + rows - seen)

    def prefix(self, length: int) -> LayerCache:
        """A cache of its own with the first `length` tokens. Raises StageError if what they need is forgotten."""
        if not self.goes_back_to(length):
            raise forgotten(length)
        copied = LayerCache(self.window)
        if self.keys is not None and self.values is not None:
            copied.first = self.first
            copied.keys, copied.values = (copied._room(None, block, 0, length) for block in (self.keys, self.values))
            held = length - self.first
            copied.keys[:, :held] = self.keys[:, :held]
            copied.values[:, :held] = self.values[:, :held]
        return copied

    def _room(self, block: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
        """`block`, or a larger one that begins with what it holds up to `start`, with room for the tokens to `end`."""
        if block is not None and end - self.first <= block.shape[1]:
            return block
        larger = like.new_empty(like.shape[0], held_tokens(end, self.window), like.shape[2])
        if block is not None:
            larger[:, : start - self.first] = block[:, : start - self.first]
        return larger

    def _slide(self, start: int, end: int, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Appends, and forgets all but the last tokens: the window, and as many as a session may go back."""
        kept, seen = max(self.first, end - window - ROLLBACK), max(self.first, start + 1 - window)
        low = min(kept, seen)
        keys, values = (
            rows if block is None else torch.cat((block[:, low - self.first : start - self.first], rows), dim=1)
            for block, rows in ((self.keys, k), (self.values, v))
        )
        self.keys, self.values = (
            self._refilled(block, rows[:, kept - low :], end)
            for block, rows in ((self.keys, keys), (self.values, values))
        )
        self.first = kept
        return keys[:, seen - low :], values[:, seen - low :]

    def _refilled(self, block: Tensor | None, rows: Tensor, end: int) -> Tensor:
        """A block of the largest size that begins with `rows`: `block`, if it is one."""
        size = held_tokens(end, self.window)
        if block is None or block.shape[1] < size:
            block = rows.new_empty(rows.shape[0], size, rows.shape[2])
        block[:, : rows.shape[1]] = rows
        return block


def forgotten(position: int) -> StageError:
    return StageError(
        f"these layers can't go back to position {position}",
        "what slid out of their windows is forgotten",
        "start the session again from its first token",
    )
