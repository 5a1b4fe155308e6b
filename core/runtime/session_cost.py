"""What a session's caches take on a machine, by the number of tokens that they have room for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from core.interfaces.architecture import CacheSize
from core.interfaces.dtypes import DType
from core.runtime.layer_cache import window_capacity

ENDLESS = 1 << 40
"""Tokens: as good as any number."""


class SessionCost:
    """Bytes that a session's caches of some layers take.

    Two sessions never take less than one with the tokens of both.
    """

    def __init__(self, sizes: Iterable[CacheSize], dtype: DType) -> None:
        self._kinds = Counter(sizes)
        self._itemsize = dtype.itemsize

    def __call__(self, tokens: int) -> int:
        return sum(count * self._layer(size, tokens) for size, count in self._kinds.items())

    def of(self, rooms: Mapping[int, int]) -> int:
        """Of several sessions: how many there are by the tokens that they have room for."""
        return sum(count * self(tokens) for tokens, count in rooms.items())

    def _layer(self, size: CacheSize, tokens: int) -> int:
        held = tokens if size.window is None else min(tokens, window_capacity(size.window))
        values = held * size.token_values + size.state_values
        return values * self._itemsize + size.state_fp32_values * DType.FP32.itemsize


def longest_session(cost: Callable[[int], int], nbytes: int) -> int:
    """For how many tokens a session's caches have room that take no more than `nbytes`: up to ENDLESS."""
    return max(0, bisect_right(range(ENDLESS), nbytes, key=cost) - 1)
