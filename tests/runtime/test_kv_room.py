"""Caches of several stages share the room that was promised, whoever fills them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from core.errors import StageError
from core.runtime.kv_cache import CacheStore
from core.runtime.kv_room import KVRoom

BLOCK = 256


@dataclass(frozen=True)
class Piece:
    session: int
    position: int
    rows: int
    outputs: int = 1


def store_in(room: KVRoom) -> CacheStore:
    """One byte a token."""
    store = CacheStore(range(1))
    store.bound(room, lambda tokens: tokens)
    return store


def fill(store: CacheStore, session: int, rows: int) -> None:
    [cache] = store.begin([Piece(session, 0, rows)])
    cache.length = rows


def test_more_sessions_than_fit_are_refused_and_those_that_are_there_go_on() -> None:
    store = store_in(KVRoom(2 * BLOCK))
    for session in range(3):
        fill(store, session, 1)
    with pytest.raises(StageError, match="no room for more KV cache"):
        fill(store, 3, 1)
    assert len(store) == 3
    fill(store, 2, BLOCK)
    with pytest.raises(StageError, match="no room"):
        fill(store, 2, BLOCK + 1)
    store.clear([0, 99])
    fill(store, 2, BLOCK + 1)


def test_a_batch_that_does_not_fit_begins_none_of_its_sessions() -> None:
    store = store_in(KVRoom(0))
    with pytest.raises(StageError):
        store.begin([Piece(1, 0, 5), Piece(2, 0, 5)])
    assert len(store) == 0
    store.begin([Piece(1, 0, 5), Piece(1, 0, 7)])


def test_copies_take_room_whatever_their_length_and_their_place_is_taken_over() -> None:
    store = store_in(KVRoom(BLOCK))
    fill(store, 1, 1)
    store.copy(1, 2, 0)
    for _ in range(9):
        store.copy(1, 2, 1)
    with pytest.raises(StageError):
        store.copy(1, 3, 0)
    assert len(store) == 2


def test_stages_share_it_and_give_back_what_they_took() -> None:
    room = KVRoom(2 * BLOCK)
    one, other = store_in(room), store_in(room)
    fill(one, 1, 3 * BLOCK)
    fill(other, 1, 1)
    with pytest.raises(StageError):
        fill(other, 2, 1)
    one.clear_all()
    fill(other, 2, 1)
    other.clear_all()
    assert room.taken == 0


def test_a_promise_holds_while_somebody_counts_on_it_and_never_beyond_the_bound() -> None:
    room = KVRoom(0)
    room.promise(100)
    room.take(60)
    room.promise(50)
    assert room.limit == 100
    room.promise(50, at_most=70)
    assert room.limit == 70
    room.take(-60)
    room.promise(50)
    assert room.limit == 50
