"""What a route does with answers: who gets them, when, and what it keeps of batches whose sender has left."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.coordinator.members import Member
from core.coordinator.route import Hop, Route
from core.errors import ProtocolError, RouteError
from core.link import Link
from core.protocol.codec import Packet
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    HiddenState,
    InferenceError,
    LoadProgress,
    PeerConnected,
    RunPrefill,
    Segment,
    Tensor,
)

ROW = Tensor("fp32", 1, 1, bytes(4))
BATCH = RunPrefill(1, [Segment(1, 0, 1, 1)], ROW)
ANSWER = HiddenState(1, ROW)


class Empty:
    """A link on which everything is sent at once."""

    async def send(self, *_: Any) -> None:
        await trio.lowlevel.checkpoint()


def route_over(link: object) -> tuple[Member, Route]:
    member = cast(Member, SimpleNamespace(node_id="a", link=link))
    return member, Route(1, [Hop(member, range(1))])


class Full:
    """A link on which nothing more can be sent for now."""

    async def send(self, *_: Any) -> None:
        await trio.sleep_forever()


async def test_an_answer_to_a_batch_that_was_never_sent_harms_nobody() -> None:
    member, route = route_over(Full())
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(route.submit, BATCH)
            await wait_all_tasks_blocked()
            await route.take(member, Packet(InferenceError(1, "I guess what comes"), request_id="1"))
            nursery.cancel_scope.cancel()
    assert route.under_way == 0


async def test_only_the_last_hop_answers() -> None:
    first, last = (cast(Member, SimpleNamespace(node_id=name, link=Empty())) for name in ("a", "b"))
    route = Route(1, [Hop(first, range(1)), Hop(last, range(1, 2))])
    await route.submit(BATCH)
    with pytest.raises(ProtocolError, match="'a' sent a HIDDEN_STATE that is not its to send"):
        await route.take(first, Packet(ANSWER, request_id="1"))
    assert route.under_way == 1


async def test_work_on_an_answer_begins_while_that_is_taken() -> None:
    member, route = route_over(Empty())
    begun: list[HiddenState] = []
    with trio.fail_after(10):
        ticket = await route.submit(BATCH)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(route.answer, ticket, begin=begun.append))
            await wait_all_tasks_blocked()
            await route.take(member, Packet(ANSWER, request_id="1"))
            assert begun == [ANSWER]
            ticket.done.set()


async def test_work_on_an_answer_that_came_before_anybody_waited_begins_then() -> None:
    member, route = route_over(Empty())
    begun: list[HiddenState] = []

    def begin(answer: HiddenState) -> None:
        begun.append(answer)
        ticket.done.set()

    with trio.fail_after(10):
        ticket = await route.submit(BATCH)
        await route.take(member, Packet(ANSWER, request_id="1"))
        assert await route.answer(ticket, begin=begin) is ANSWER
    assert begun == [ANSWER]


async def test_a_node_that_says_other_things_is_waited_for_no_longer(autojump_clock: MockClock) -> None:
    member = Member(Hello(PROTOCOL_VERSION, "a"), cast(Link, None))

    async def chatter() -> None:
        while True:
            member.post(LoadProgress(1, "load", 1, 2))
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        with pytest.raises(RouteError, match="no answer within 30 s"), trio.fail_after(31):
            await member.answer(1, PeerConnected, within=30)
        nursery.cancel_scope.cancel()
    assert member.state == "failed"
