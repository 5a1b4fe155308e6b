"""What a route does with answers: who gets them, when, and what it keeps of batches whose sender has left."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.coordinator.hop import Hop
from core.coordinator.members import Member, MemberState
from core.coordinator.route import STALL_SECONDS, Route
from core.errors import PlanError, ProtocolError, RouteError, StageError, WrongAnswer
from core.link import Link
from core.protocol.codec import Packet
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    ClearCache,
    CopyCache,
    Hello,
    HiddenState,
    InferenceError,
    LoadProgress,
    PeerConnected,
    PeerLost,
    RunPrefill,
)
from core.runtime.model import Precision

PRECISION = cast(Precision, None)
ROW = Tensor("fp32", 1, 1, bytes(4))
BATCH = RunPrefill(1, [Segment(1, 0, 1, 1)], ROW)
ANSWER = HiddenState(1, ROW)


class Empty:
    """A link on which everything is sent at once."""

    async def send(self, *_: Any) -> None:
        await trio.lowlevel.checkpoint()


def route_over(link: object) -> tuple[Member, Route]:
    member = cast(Member, SimpleNamespace(node_id="a", link=link))
    return member, Route(1, [Hop(1, member, range(1), PRECISION)])


class Full:
    """A link on which nothing more can be sent for now."""

    async def send(self, *_: Any) -> None:
        await trio.sleep_forever()


async def test_work_for_a_route_ends_when_that_breaks() -> None:
    _, route = route_over(Empty())

    async def works() -> str:
        await trio.lowlevel.checkpoint()
        return "done"

    async def fails() -> str:
        raise PlanError("there is no plan")

    with trio.fail_after(300):
        assert await route.unless_broken(works) == "done"
        with pytest.raises(PlanError):
            await route.unless_broken(fails)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fail_later, route)
            assert await route.unless_broken(trio.sleep_forever) is None


async def _fail_later(route: Route) -> None:
    await wait_all_tasks_blocked()
    route.fail(RouteError("it broke"))


async def test_an_answer_to_a_batch_that_was_never_sent_harms_nobody() -> None:
    member, route = route_over(Full())
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(route.submit, BATCH)
            await wait_all_tasks_blocked()
            await route.take(member, 1, Packet(InferenceError(1, "I guess what comes"), request_id="1"))
            nursery.cancel_scope.cancel()
    assert route.in_flight == 0


async def test_only_the_last_hop_answers() -> None:
    first, last = (cast(Member, SimpleNamespace(node_id=name, link=Empty())) for name in ("a", "b"))
    route = Route(1, [Hop(1, first, range(1), PRECISION), Hop(2, last, range(1, 2), PRECISION)])
    await route.submit(BATCH)
    with pytest.raises(ProtocolError, match="'a' sent a HIDDEN_STATE that is not its to send"):
        await route.take(first, 1, Packet(ANSWER, request_id="1"))
    assert route.in_flight == 1


async def test_work_on_an_answer_begins_while_that_is_taken() -> None:
    member, route = route_over(Empty())
    begun: list[HiddenState] = []
    with trio.fail_after(300):
        ticket = await route.submit(BATCH)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(route.answer, ticket, begin=begun.append))
            await wait_all_tasks_blocked()
            await route.take(member, 1, Packet(ANSWER, request_id="1"))
            assert begun == [ANSWER]
            ticket.done.set()


async def test_work_on_an_answer_that_came_before_anybody_waited_begins_then() -> None:
    member, route = route_over(Empty())
    begun: list[HiddenState] = []

    def begin(answer: HiddenState) -> None:
        begun.append(answer)
        ticket.done.set()

    with trio.fail_after(300):
        ticket = await route.submit(BATCH)
        await route.take(member, 1, Packet(ANSWER, request_id="1"))
        assert await route.answer(ticket, begin=begin) is ANSWER
    assert begun == [ANSWER]


async def test_a_node_that_says_other_things_is_waited_for_no_longer(autojump_clock: MockClock) -> None:
    member = Member(Hello(PROTOCOL_VERSION, "a"), cast(Link, None))
    hop = Hop(1, member, range(1), PRECISION)
    member.add(hop)

    async def chatter() -> None:
        while True:
            member.post(LoadProgress(1, "load", 1, 2))
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        with pytest.raises(RouteError, match="no answer within 30 s"), trio.fail_after(31):
            await hop.answer(PeerConnected, within=30)
        nursery.cancel_scope.cancel()
    member.drop(hop)
    assert member.state is MemberState.FAILED


def route_of_two() -> tuple[Member, Member, Noted, Route]:
    first, last = (cast(Member, SimpleNamespace(node_id=name, link=Noted())) for name in ("a", "b"))
    route = Route(1, [Hop(1, first, range(1), PRECISION), Hop(2, last, range(1, 2), PRECISION)])
    return first, last, cast(Noted, last.link), route


class Noted:
    """A link that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send(self, message: Any, request_id: str = "") -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(message)


ONWARD = RunPrefill(2, BATCH.segments, ROW)


async def test_a_batch_is_relayed_once_and_only_while_it_is_in_flight() -> None:
    first, last, link, route = route_of_two()
    await route.take(first, 2, Packet(ONWARD, request_id="1"))
    assert link.sent == [], "nothing was in flight"
    await route.submit(BATCH)
    await route.take(first, 2, Packet(ONWARD, request_id="1"))
    assert link.sent == [ONWARD]
    with pytest.raises(ProtocolError, match="'a' sent a RUN_PREFILL that is not the one it was given"):
        await route.take(first, 2, Packet(ONWARD, request_id="1"))
    await route.take(last, 2, Packet(HiddenState(2, ROW), request_id="1"))
    await route.take(first, 2, Packet(ONWARD, request_id="1"))
    assert link.sent == [ONWARD]


async def test_no_rows_but_a_batchs_own_are_relayed() -> None:
    first, _, link, route = route_of_two()
    await route.submit(BATCH)
    with pytest.raises(ProtocolError, match="'a' sent a RUN_PREFILL that is not the one it was given"):
        await route.take(first, 2, Packet(RunPrefill(2, [Segment(7, 0, 1, 1)], ROW), request_id="1"))
    assert link.sent == []


async def test_no_cache_commands_but_the_coordinators_own_are_relayed_once_and_in_order() -> None:
    first, _, link, route = route_of_two()
    copy, clear = CopyCache(1, 7, 8, 3), ClearCache(1, [7])
    for command in (copy, clear):
        await route.command(command)
    copied, cleared = CopyCache(2, 7, 8, 3), ClearCache(2, [7])
    await route.take(first, 2, Packet(copied))
    for foreign in (ClearCache(2, [9]), cleared):
        with pytest.raises(ProtocolError, match="a CLEAR_CACHE came for the hop 2 that nobody was given"):
            await route.take(first, 2, Packet(foreign))
    assert link.sent == [copied]


@pytest.mark.parametrize("rows", [0, 2], ids=str)
async def test_hidden_states_of_another_shape_fail_their_batch_and_name_the_node(rows: int) -> None:
    first, last, link, route = route_of_two()
    misshapen = Tensor("fp32", rows, 1, bytes(4 * rows))
    relayed, answered = await route.submit(BATCH), await route.submit(BATCH)
    await route.take(first, 2, Packet(RunPrefill(2, BATCH.segments, misshapen), request_id="1"))
    await route.take(last, 2, Packet(HiddenState(2, misshapen), request_id="2"))
    for ticket, node in ((relayed, "a"), (answered, "b")):
        with pytest.raises(WrongAnswer, match=f"node '{node}' made hidden states of {rows} x 1 in fp32: not 1 x 1 in"):
            await route.answer(ticket, begin=lambda _: None)
    assert link.sent == []
    assert route.failure is None


async def test_an_answer_to_nothing_is_no_sign_of_life(autojump_clock: MockClock) -> None:
    member = Member(Hello(PROTOCOL_VERSION, "a"), cast(Link, Empty()))
    route = Route(1, [Hop(1, member, range(1), PRECISION)])
    ticket = await route.submit(BATCH)

    async def chatter() -> None:
        while True:
            await trio.sleep(1)
            await route.take(member, 1, Packet(InferenceError(1, "I am here"), request_id="none"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        with pytest.raises(RouteError, match="node 'a' gave no answer"), trio.fail_after(STALL_SECONDS + 1):
            await route.answer(ticket, begin=lambda _: None)
        nursery.cancel_scope.cancel()
    assert member.failed_lately, "it alone can have been silent"


async def test_a_batch_that_a_later_one_overtakes_was_dropped(autojump_clock: MockClock) -> None:
    _, last, _, route = route_of_two()
    dropped, later = await route.submit(BATCH), await route.submit(BATCH)
    await route.take(last, 2, Packet(HiddenState(2, ROW), request_id="2"))
    with pytest.raises(RouteError, match="no answer: to a batch that was overtaken"), trio.fail_after(60):
        await route.answer(dropped, begin=lambda _: None)
    assert later.result is not None


async def test_a_batch_that_fails_on_an_early_hop_overtakes_none(autojump_clock: MockClock) -> None:
    first, last, _, route = route_of_two()
    slow, failed = await route.submit(BATCH), await route.submit(BATCH)
    await route.take(first, 1, Packet(InferenceError(1, "no memory"), request_id="2"))
    with pytest.raises(StageError, match="no memory"):
        await route.answer(failed, begin=lambda _: None)

    async def answer_late() -> None:
        await trio.sleep(STALL_SECONDS - 1)
        await route.take(last, 2, Packet(HiddenState(2, ROW), request_id="1"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_late)
        assert await route.answer(slow, begin=lambda _: slow.done.set()) == HiddenState(2, ROW)


async def test_a_batch_waits_for_those_before_it(autojump_clock: MockClock) -> None:
    _, last, _, route = route_of_two()
    tickets = [await route.submit(BATCH) for _ in range(3)]

    async def answer_slowly() -> None:
        for number in range(1, 4):
            await trio.sleep(STALL_SECONDS - 1)
            await route.take(last, 2, Packet(HiddenState(2, ROW), request_id=str(number)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_slowly)
        for ticket in reversed(tickets):
            nursery.start_soon(partial(route.answer, ticket, begin=lambda _, done=ticket.done: done.set()))
    assert route.failure is None


async def test_who_has_no_neighbour_can_not_lose_one() -> None:
    member, route = route_over(Empty())
    with pytest.raises(ProtocolError, match="'a' sent a PEER_LOST that is not its to send"):
        await route.take(member, 1, Packet(PeerLost(1, "it is gone")))
