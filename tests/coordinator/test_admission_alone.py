"""Admission by itself: what is reserved for whom, without nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from core.coordinator.admission import Admission
from core.coordinator.decoding import Decoding
from core.coordinator.route import Route
from core.coordinator.session import Session
from core.coordinator.telemetry import Telemetry

BUDGET = 2560
HALF = 1280


def session(number: int, max_tokens: int, *, bounded: bool) -> Session:
    told = SimpleNamespace(
        max_tokens=max_tokens,
        bounded=bounded,
        tokens=0,
        wants_prompt_logprobs=False,
        speculation=SimpleNamespace(drafted=0, accepted=0),
    )
    return Session(number, range(10), cast(Decoding, told))


async def test_nothing_is_reserved_for_one_that_left_while_it_waited_for_more_room() -> None:
    admission = Admission(max_sessions=8, keeps=False, rolls_back=True, telemetry=Telemetry())
    admission.open(cast(Route, SimpleNamespace(kv_tokens=BUDGET, epoch=1)), lambda _: None)
    growing, other = session(1, 10_000, bounded=False), session(2, HALF - 20, bounded=True)
    for each in (growing, other):
        await admission.enter(each)
    assert (growing.reserved, other.reserved, admission.budget.reserved) == (HALF, HALF, BUDGET)
    growing.tokens += range(HALF)
    assert not admission.has_room(growing)
    for each in (growing, other):
        each.over = True
        admission.leave(each)
    assert (admission.running, admission.budget.reserved) == ({}, 0)
