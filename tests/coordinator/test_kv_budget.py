"""The budget: what is reserved, what ended sessions leave, and who makes room for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from core.coordinator.kv_budget import MAX_KEPT, MIN_KEPT_TOKENS, KVBudget

CHAT = list(range(100, 200))


@dataclass
class Memory:
    """For so many tokens, and in which every session takes as much as `per_session` tokens besides."""

    kv_tokens: int
    per_session: int = 0

    def fits(self, rooms: Mapping[int, int]) -> bool:
        return sum(count * (tokens + self.per_session) for tokens, count in rooms.items()) <= self.kv_tokens


def budget_of(tokens: int, *, keeps: bool) -> KVBudget:
    return KVBudget(Memory(tokens), keeps=keeps)


def test_reservations_fill_it_and_hand_back() -> None:
    budget = budget_of(1000, keeps=True)
    assert budget.reserve(600) == []
    assert budget.reserve(500) is None
    assert budget.reserve(400) == []
    budget.release(600)
    assert budget.reserve(600) == []
    assert budget.reserved == 1000
    assert not budget.has_room(1)


def test_the_least_recently_used_caches_make_room_first() -> None:
    budget = budget_of(1000, keeps=True)
    for cache, first in ((1, 0), (2, 1000), (3, 2000)):
        assert budget.keep(cache, [first + token for token in CHAT], 300) == []
    oldest, _ = budget.longest_prefix(CHAT)
    assert oldest is not None
    budget.touch(oldest)
    assert budget.reserve(400) == [2]
    assert budget.reserve(300) == [3]
    assert (budget.reserved, budget.kept) == (700, 300)


def test_what_is_spared_stays_and_what_is_taken_counts_no_more() -> None:
    budget = budget_of(600, keeps=True)
    budget.keep(1, CHAT, 300)
    kept, common = budget.longest_prefix([*CHAT, 5])
    assert kept is not None
    assert common == len(CHAT)
    assert budget.has_room(400), "it could be given up"
    assert budget.reserve(400, spared=kept) is None
    assert budget.kept == 300
    assert budget.reserve(600, taken=kept) == []
    assert (budget.reserved, budget.kept) == (600, 0)
    assert budget.longest_prefix(CHAT) == (None, 0)


def test_alike_is_the_longest_beginning_and_of_equals_the_latest() -> None:
    budget = budget_of(10_000, keeps=True)
    for cache, tokens in ((1, CHAT[:40]), (2, CHAT), (3, [*CHAT[:60], 7]), (4, CHAT)):
        budget.keep(cache, tokens, 100)
    kept, common = budget.longest_prefix([*CHAT, 1, 2])
    assert kept is not None
    assert (kept.cache, common) == (4, 100)
    kept, common = budget.longest_prefix(CHAT[:30])
    assert common == 30
    assert budget.longest_prefix([1, *CHAT]) == (None, 0)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_not_worth_keeping_is_freed_at_once(keeps: bool) -> None:
    budget = budget_of(1000, keeps=keeps)
    assert budget.keep(1, CHAT[: MIN_KEPT_TOKENS - 1], 256) == [1]
    assert budget.keep(2, CHAT, 256) == ([] if keeps else [2])


def test_no_more_is_kept_than_can_be_looked_through() -> None:
    budget = budget_of(10**9, keeps=True)
    for cache in range(MAX_KEPT):
        assert budget.keep(cache, CHAT, 256) == []
    assert budget.keep(MAX_KEPT, CHAT, 256) == [0]


@pytest.mark.parametrize(("tokens", "longest"), [(0, 0), (255, 0), (1000, 768), (5000, 4096), (1_000_000, 917_504)])
def test_the_longest_session_fits_with_the_memory_that_its_caches_grow_into(tokens: int, longest: int) -> None:
    assert budget_of(tokens, keeps=False).longest == longest


def test_what_the_memory_holds_can_change_under_it() -> None:
    memory = Memory(1000)
    budget = KVBudget(memory, keeps=True)
    assert budget.keep(1, CHAT, 200) == []
    assert budget.reserve(600) == []
    memory.kv_tokens = 700
    assert (budget.tokens, budget.reserved + budget.kept) == (700, 800)
    assert not budget.has_room(101)
    assert budget.reserve(100) == [1], "what was kept goes, what runs stays"
    assert budget.reserve(1) is None


def test_who_is_told_to_forget_keeps_nothing_from_then_on() -> None:
    budget = budget_of(1000, keeps=True)
    budget.keep(1, CHAT, 256)
    budget.keep(2, CHAT, 256)
    assert budget.forget() == [1, 2]
    assert budget.kept == 0
    assert budget.keep(3, CHAT, 256) == [3]


def test_what_every_session_takes_whatever_its_length_counts_for_ended_ones_too() -> None:
    """A recurrent state stays with the caches that are kept."""
    budget = KVBudget(Memory(1000, per_session=100), keeps=True)
    assert budget.keep(1, CHAT, 200) == []
    assert budget.keep(2, CHAT, 200) == []
    assert budget.reserve(200) == []
    assert budget.rooms == Counter({200: 3})
    assert budget.reserve(100) == [1]
    assert budget.reserve(400, held=100) == [2]
    assert (budget.reserved, budget.kept) == (600, 0)
    budget.release(200)
    assert budget.rooms == Counter({400: 1})
