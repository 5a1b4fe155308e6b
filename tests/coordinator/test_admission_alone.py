"""Admission by itself: what is reserved for whom, without nodes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from core.coordinator.admission import Admission
from core.coordinator.decoding import Decoding
from core.coordinator.route import Route
from core.coordinator.session import Session
from core.coordinator.waiting_queue import WaitingQueue
from core.errors import RequestError
from core.runtime.cuts import Cuts

BUDGET = 2560
HALF = 1280


class Counted:
    """How often sessions were begun, and how often one has left."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.left = 0

    def begin(self, session: Session) -> None:
        self.begun.append(session.number)

    def leave(self) -> None:
        self.left += 1


def admission_to(
    queue: WaitingQueue, counted: Counted, room: Sequence[int] = (BUDGET,), *, keeps: bool = False
) -> Admission:
    """`room`: how many tokens the route has memory for, which may change."""
    route = SimpleNamespace(
        kv_tokens=room[0],
        kv_capacity=room[0],
        fits=lambda rooms: sum(rooms.elements()) <= room[0],
        is_settled=True,
        failure=None,
        epoch=1,
        hops=[SimpleNamespace(number=1)],
    )
    options = {"max_sessions": 8, "answer_tokens": 1024, "keeps": keeps, "cuts": Cuts()}
    return Admission(cast(Route, route), queue, counted.begin, counted.leave, **options)


def session(number: int, max_tokens: int, *, bounded: bool) -> Session:
    decoding = SimpleNamespace(max_tokens=max_tokens, bounded=bounded, prompt_logprobs_asked=None)
    return Session(number, range(10), cast(Decoding, decoding))


def reserved(session: Session) -> int:
    return session.place.reserved if session.place is not None else 0


async def test_nothing_is_reserved_for_one_that_left_while_it_waited_for_more_room() -> None:
    queue, counted = WaitingQueue(), Counted()
    admission = admission_to(queue, counted)
    growing, other = session(1, BUDGET - 10, bounded=False), session(2, HALF - 20, bounded=True)
    for each in (growing, other):
        queue.add(each, deadline=60)
    admission.admit()
    assert counted.begun == [1, 2]
    assert (reserved(growing), reserved(other), admission.budget.reserved) == (HALF, HALF, BUDGET)
    growing.tokens += range(HALF)
    assert not admission.has_room(growing)
    for each in (growing, other):
        each.leave("cancelled")
        admission.leave(each)
    admission.admit()
    assert (admission.running, admission.budget.reserved, counted.left) == ({}, 0, 2)
    assert counted.begun == [1, 2]


async def test_one_that_outgrows_all_memory_is_refused_before_it_waits_for_it() -> None:
    queue, counted = WaitingQueue(), Counted()
    admission = admission_to(queue, counted)
    large, small = session(1, 2 * BUDGET, bounded=True), session(2, 10, bounded=True)
    for each in (large, small):
        queue.add(each, deadline=60)
    admission.admit()
    assert isinstance(large.failure, RequestError)
    assert large.failure.code == "context_length_exceeded"
    assert counted.begun == [2]
    assert queue.sessions == []


@pytest.mark.parametrize("is_open", [True, False])
async def test_nobody_is_let_onto_a_route_that_is_closed(is_open: bool) -> None:
    queue, counted = WaitingQueue(), Counted()
    admission = admission_to(queue, counted)
    if not is_open:
        admission.close()
    queue.add(session(1, 10, bounded=True), deadline=60)
    admission.admit()
    assert counted.begun == ([1] if is_open else [])


async def test_a_kept_cache_that_does_not_fit_any_more_is_given_up_and_not_waited_for() -> None:
    room, queue, counted = [40_000], WaitingQueue(), Counted()
    admission = admission_to(queue, counted, room, keeps=True)
    assert admission.budget.keep(7, list(range(2000)), 32_768) == []
    room[0] = 30_000
    decoding = SimpleNamespace(max_tokens=100, bounded=True, prompt_logprobs_asked=None)
    queue.add(Session(1, range(1000), cast(Decoding, decoding)), deadline=60)
    admission.admit()
    assert counted.begun == [1]
    assert admission.budget.kept == 0
