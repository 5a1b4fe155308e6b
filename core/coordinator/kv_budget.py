"""The KV memory of a route as a budget of tokens: what running sessions may fill, and ended ones still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.runtime.kv_cache import longest_within

MIN_KEPT_TOKENS = 16
"""Tokens: a shorter common beginning is prefilled again."""
MAX_KEPT = 256
"""Caches of ended sessions."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The caches that an ended session left on the route: of `tokens`, with memory for `room`. `client` alone may begin
    with them: how many of a prompt's tokens are cached, and how soon it is answered, tells of what was asked before."""

    client: str
    cache: int
    tokens: torch.Tensor
    head: tuple[int, ...]
    room: int


class KVBudget:
    """Counts in tokens of the hop that has the least memory for them. Least recently used caches make room first."""

    def __init__(self, capacity: Callable[[], int], *, keeps: bool) -> None:
        """`capacity` tells how many tokens the route's memory has room for; `keeps`: ended sessions' caches stay until
        others need room."""
        self.reserved = 0
        self._capacity = capacity
        self._keeps = keeps
        self._kept: list[Kept] = []

    @property
    def tokens(self) -> int:
        """What may be reserved and kept in all."""
        return self._capacity()

    @property
    def kept(self) -> int:
        return sum(kept.room for kept in self._kept)

    @property
    def used(self) -> int:
        return self.reserved + self.kept

    @property
    def longest(self) -> int:
        """Tokens of the longest session that there is room for, were it alone."""
        return longest_within(self.tokens)

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` can be reserved, if all that ended sessions left is given up for it."""
        return tokens <= self.tokens - self.reserved

    def reserve(self, tokens: int, *, taken: Kept | None = None, spared: Kept | None = None) -> list[int] | None:
        """Takes `tokens` of the budget: the caches that have to go for it, or None where there is no room.

        `taken` is handed over with it, and `spared` stays.
        """
        free = self.tokens - self.reserved - self.kept + (taken.room if taken else 0)
        gone: list[Kept] = []
        for kept in self._kept:
            if free >= tokens:
                break
            if kept is not taken and kept is not spared:
                gone.append(kept)
                free += kept.room
        if free < tokens:
            return None
        self._kept = [kept for kept in self._kept if kept is not taken and kept not in gone]
        self.reserved += tokens
        return [kept.cache for kept in gone]

    def release(self, tokens: int) -> None:
        self.reserved -= tokens

    def keep(self, cache: int, tokens: Sequence[int], room: int, client: str = "") -> list[int]:
        """Keeps an ended session's caches, whose reservation was released: the caches that are to be freed."""
        if not self._keeps or len(tokens) < MIN_KEPT_TOKENS:
            return [cache]
        self._kept.append(Kept(client, cache, torch.tensor(tokens), tuple(tokens[:MIN_KEPT_TOKENS]), room))
        gone = self._kept[: max(0, len(self._kept) - MAX_KEPT)]
        del self._kept[: len(gone)]
        return [kept.cache for kept in gone]

    def longest_prefix(self, tokens: Sequence[int], client: str = "") -> tuple[Kept | None, int]:
        """Of the caches that are kept for `client`, those with the longest beginning in common with `tokens`, and how
        long that is."""
        head = tuple(tokens[:MIN_KEPT_TOKENS])
        candidates = [kept for kept in self._kept if kept.client == client and kept.head == head]
        if not candidates:
            return None, 0
        wanted = torch.tensor(tokens)
        best, length = None, 0
        for kept in candidates:
            if (common := common_prefix(kept.tokens, wanted)) >= length:
                best, length = kept, common
        return best, length

    def forget(self) -> list[int]:
        """Keeps nothing, from now on: the caches that are to be freed."""
        gone, self._kept, self._keeps = self._kept, [], False
        return [kept.cache for kept in gone]

    def touch(self, kept: Kept) -> None:
        """It was of use: others go first."""
        self._kept.remove(kept)
        self._kept.append(kept)


def common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many leading values of two one-dimensional tensors are equal."""
    length = min(len(one), len(other))
    differing = (one[:length] != other[:length]).nonzero()
    return int(differing[0]) if len(differing) else length
