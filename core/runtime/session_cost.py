"""What a session's caches take on a machine, by the number of tokens that they have room for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from core.interfaces.architecture import CacheSize
from core.interfaces.dtypes import DType, KVDType
from core.runtime.kv_packing import PACKINGS
from core.runtime.layer_cache import window_capacity

ENDLESS = 1 << 40
"""Tokens: as good as any number."""


class SessionCost:
    """Bytes that a session's caches of some layers take.

    Two sessions never take less than one with the tokens of both.
    """

    def __init__(self, sizes: Iterable[CacheSize], dtype: DType, kv: KVDType = KVDType.AUTO) -> None:
        self._kinds = Counter(sizes)
        self._dtype = dtype
        self._packing = PACKINGS[kv]

    def __call__(self, tokens: int) -> int:
        return sum(count * self._layer(size, tokens) for size, count in self._kinds.items())

    def of(self, rooms: Mapping[int, int]) -> int:
        """Of several sessions: how many there are by the tokens that they have room for."""
        return sum(count * self(tokens) for tokens, count in rooms.items())

    def _layer(self, size: CacheSize, tokens: int) -> int:
        held = tokens
        if size.window is not None and tokens > window_capacity(size.window):
            held = window_capacity(size.window) + size.window - 1  # the last are a snapshot
        states = size.state_values * self._dtype.itemsize + size.state_fp32_values * DType.FP32.itemsize
        return held * self._packing.token_bytes(size, self._dtype) + states


def longest_session(cost: Callable[[int], int], nbytes: int) -> int:
    """For how many tokens a session's caches have room that take no more than `nbytes`: up to ENDLESS."""
    return max(0, bisect_right(range(ENDLESS), nbytes, key=cost) - 1)
