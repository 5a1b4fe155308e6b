"""The KV memory of a route as a budget: what running sessions may fill, and ended ones still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from core.runtime.cuts import ANYWHERE, Cuts
from core.runtime.layer_cache import longest_within

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
    snapshot: int = 0
    """Behind so many of the tokens the last snapshot was taken."""


class CacheMemory(Protocol):
    """What a route's hops have memory for."""

    @property
    def kv_tokens(self) -> int:
        """The tokens of the longest session that fits, were it alone."""

    def fits(self, rooms: Mapping[int, int]) -> bool:
        """Whether the caches of some sessions do: how many there are by the tokens that they have room for."""


class KVBudget:
    """Counts what sessions have room for in tokens, and asks the route's `memory` whether all of it fits.

    What a session takes need not grow with its tokens alone. Least recently used caches make room first. `keeps`: ended
    sessions' caches stay until others need room.
    """

    def __init__(self, memory: CacheMemory, *, keeps: bool) -> None:
        self._memory = memory
        self._keeps = keeps
        self._reserved = Counter[int]()
        self._kept: list[Kept] = []

    @property
    def tokens(self) -> int:
        """What one session may have room for."""
        return self._memory.kv_tokens

    @property
    def reserved(self) -> int:
        return sum(self._reserved.elements())

    @property
    def kept(self) -> int:
        return sum(kept.room for kept in self._kept)

    @property
    def rooms(self) -> Counter[int]:
        """Of all that is reserved or kept: how many sessions there are by the tokens that they have room for."""
        return self._reserved + _rooms_of(self._kept)

    @property
    def longest(self) -> int:
        """Tokens of the longest session that there is room for, were it alone."""
        return longest_within(self.tokens)

    def has_room(self, tokens: int) -> bool:
        """Whether room for `tokens` can be reserved, if all that ended sessions left is given up for it."""
        return self._memory.fits(self._reserved + Counter([tokens]))

    def reserve(
        self, tokens: int, *, held: int = 0, taken: Kept | None = None, spared: Kept | None = None
    ) -> list[int] | None:
        """Reserves room for a session's `tokens`: the caches that have to go for it, or None where there is no room.

        `held` is what it has reserved so far; `taken` is handed over with it, and `spared` stays.
        """
        reserved = self._reserved + Counter([tokens])
        if held:
            reserved -= Counter([held])
        staying = [kept for kept in self._kept if kept is not taken]
        gone: list[Kept] = []
        rooms = reserved + _rooms_of(staying)
        for kept in [kept for kept in staying if kept is not spared]:
            if self._memory.fits(rooms):
                break
            staying.remove(kept)
            gone.append(kept)
            rooms -= Counter([kept.room])
        if not self._memory.fits(rooms):
            return None
        self._reserved, self._kept = reserved, staying
        return [kept.cache for kept in gone]

    def release(self, tokens: int) -> None:
        """Of what was reserved for a session."""
        self._reserved -= Counter([tokens])

    def keep(self, cache: int, tokens: Sequence[int], room: int, client: str = "", snapshot: int = 0) -> list[int]:
        """Keeps an ended session's caches, whose reservation was released: the caches that are to be freed."""
        if not self._keeps or len(tokens) < MIN_KEPT_TOKENS:
            return [cache]
        self._kept.append(Kept(client, cache, torch.tensor(tokens), tuple(tokens[:MIN_KEPT_TOKENS]), room, snapshot))
        gone = self._kept[: max(0, len(self._kept) - MAX_KEPT)]
        del self._kept[: len(gone)]
        return [kept.cache for kept in gone]

    def longest_prefix(self, tokens: Sequence[int], client: str = "", cuts: Cuts = ANYWHERE) -> tuple[Kept | None, int]:
        """Of the caches that are kept for `client`, those with the longest beginning in common with `tokens` that they
        can be cut back to, and how long that is."""
        head = tuple(tokens[:MIN_KEPT_TOKENS])
        candidates = [kept for kept in self._kept if kept.client == client and kept.head == head]
        if not candidates:
            return None, 0
        wanted = torch.tensor(tokens)
        best, length = None, 0
        for kept in candidates:
            common = cuts.longest(len(kept.tokens), common_prefix(kept.tokens, wanted), kept.snapshot)
            if common >= max(length, MIN_KEPT_TOKENS):
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


def _rooms_of(kept: Sequence[Kept]) -> Counter[int]:
    return Counter(each.room for each in kept)


def common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many leading values of two one-dimensional tensors are equal."""
    length = min(len(one), len(other))
    differing = (one[:length] != other[:length]).nonzero()
    return int(differing[0]) if len(differing) else length
