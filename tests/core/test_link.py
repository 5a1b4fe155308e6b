"""A link answers heartbeats, notices silence, bounds its queue, and leaves nothing behind however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from core.errors import ChannelClosed, CoreError, ProtocolError, sole_error
from core.interfaces.transport import Channel
from core.link import (
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    PATIENCE_SECONDS,
    WRITE_SECONDS,
    Link,
    first_message,
    open_link,
)
from core.protocol.codec import CHUNK_BYTES, Decoder, Packet, encode
from core.protocol.fields import Tensor
from core.protocol.messages import Chunk, Error, HiddenState, Message, PeerLost, Ping, Pong
from core.testing.contracts import HOST, listening
from core.testing.transport import BUFFERED_MESSAGES, MemoryTransport

FOREVER = 10_000.0
"""Seconds of the test's clock, which jumps."""


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport()


@asynccontextmanager
async def linked(
    transport: MemoryTransport, other_end: Callable[[Link], Awaitable[None]]
) -> AsyncIterator[tuple[Link, int]]:
    """A link whose other end runs `other_end`, and the port between them."""

    async def serve(channel: Channel) -> None:
        async with open_link(channel) as link:
            await other_end(link)

    async with (
        listening(transport, serve) as port,
        transport.dial(HOST, port, timeout=1) as channel,
        open_link(channel) as link,
    ):
        yield link, port


@asynccontextmanager
async def bare(transport: MemoryTransport, link_end: Callable[[Link], Awaitable[None]]) -> AsyncIterator[Channel]:
    """A channel without a link of its own, to a link that runs `link_end`."""

    async def serve(channel: Channel) -> None:
        async with open_link(channel) as link:
            await link_end(link)

    async with listening(transport, serve) as port, transport.dial(HOST, port, timeout=1) as channel:
        yield channel


async def keep_receiving(link: Link) -> None:
    while True:
        await link.receive()


async def echo(link: Link) -> None:
    while True:
        packet = await link.receive()
        await link.send(packet.message, packet.request_id)


async def messages_from(channel: Channel) -> AsyncIterator[Message]:
    decoder = Decoder()
    while True:
        packet = decoder.feed(await channel.receive())
        if packet is not None:
            yield packet.message


def frame(message: Message) -> bytes:
    [only] = encode(Packet(message))
    return only


async def test_messages_keep_order_and_request_id(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with linked(transport, echo) as (link, _):
        with trio.fail_after(FOREVER):
            for number in range(100):
                await link.send(PeerLost(number, "x"), format(number, "x"))
            for number in range(100):
                packet = await link.receive()
                assert (packet.message, packet.request_id) == (PeerLost(number, "x"), format(number, "x"))


async def test_a_link_says_whether_its_peer_answers_now(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async def silent(link: Link) -> None:
        await trio.sleep_forever()

    for other_end, answers in ((keep_receiving, True), (silent, False)):
        async with linked(transport, other_end) as (link, _), trio.open_nursery() as nursery:
            nursery.start_soon(keep_receiving, link)
            with trio.fail_after(PATIENCE_SECONDS + 1):
                assert await link.answers() is answers
            nursery.cancel_scope.cancel()


async def test_seq_counts_a_links_messages(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with linked(transport, echo) as (link, _):
        with trio.fail_after(FOREVER):
            for _ in range(20):
                await link.send(Error("end", ""))
            numbers = [(await link.receive()).seq for _ in range(20)]
    assert numbers == sorted(set(numbers))


async def test_a_tensor_of_many_chunks_arrives_whole_among_heartbeats(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 32)
    message = HiddenState(1, Tensor("fp32", 1, len(data) // 4, data), [])
    async with linked(transport, echo) as (link, _):
        with trio.fail_after(FOREVER):
            for _ in range(3):
                await link.send(message, "a")
                await trio.sleep(HEARTBEAT_SECONDS)
            assert [(await link.receive()).message for _ in range(3)] == [message] * 3


async def test_a_heartbeat_is_answered_by_whoever_receives(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    async with bare(transport, keep_receiving) as channel:
        with trio.fail_after(FOREVER):
            await channel.send(frame(Ping(123_456)))
            async for message in messages_from(channel):
                if isinstance(message, Pong):
                    assert message.sent_us == 123_456
                    break


async def test_a_link_beats_every_second(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    times = []
    async with bare(transport, keep_receiving) as channel:
        with trio.fail_after(FOREVER):
            async for message in messages_from(channel):
                assert isinstance(message, Ping)
                times.append(trio.current_time())
                await channel.send(frame(Pong(message.sent_us)))
                if len(times) == 5:
                    break
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([HEARTBEAT_SECONDS] * 4)


async def test_an_idle_link_lives_on_heartbeats_alone(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with linked(transport, echo) as (link, _):
        assert link.round_trip is None
        with trio.move_on_after(100 * PATIENCE_SECONDS):
            await link.receive()
        assert link.round_trip is not None
        assert link.round_trip >= 0
        await link.send(Error("end", "still here"))
        with trio.fail_after(FOREVER):
            assert (await link.receive()).message == Error("end", "still here")


async def test_silence_is_noticed_after_the_patience(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with linked(transport, keep_receiving) as (link, port):
        await trio.testing.wait_all_tasks_blocked()
        transport.stall(port)
        began = trio.current_time()
        with trio.fail_after(FOREVER), pytest.raises(ChannelClosed, match="silent for 3 s"):
            await link.receive()
        assert trio.current_time() - began == pytest.approx(PATIENCE_SECONDS)


async def test_frames_of_one_long_message_are_signs_of_life(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    data = bytes(5 * CHUNK_BYTES)
    frames = list(encode(Packet(HiddenState(1, Tensor("fp32", 1, len(data) // 4, data), []))))
    received = []

    async def receive_one(link: Link) -> None:
        received.append((await link.receive()).message)

    async with bare(transport, receive_one) as channel:
        for piece in frames:
            await trio.sleep(0.9 * PATIENCE_SECONDS)
            await channel.send(piece)
        await trio.testing.wait_all_tasks_blocked()
    assert len(received) == 1


async def test_a_cut_connection_is_noticed_at_once(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with linked(transport, keep_receiving) as (link, port):
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        transport.sever(port)
        with pytest.raises(ChannelClosed, match="broke off"):
            await link.receive()
        assert trio.current_time() == began
        await trio.sleep(HEARTBEAT_SECONDS + 0.1)
        with pytest.raises(ChannelClosed, match="the link to"):
            await link.send(Error("end", ""))


async def test_a_last_message_arrives_and_nothing_can_follow_it(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    received: list[Message] = []

    async def receive_all(link: Link) -> None:
        while True:
            received.append((await link.receive()).message)

    async with linked(transport, receive_all) as (link, _):
        for number in range(50):
            await link.send(PeerLost(number, ""))
        await link.end_with(Error("end", "the last"))
        with pytest.raises(ChannelClosed):
            await link.send(Error("end", "after the last"))
    assert received == [*(PeerLost(number, "") for number in range(50)), Error("end", "the last")]


async def test_what_was_sent_before_a_normal_end_arrives(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    received: list[Message] = []

    async def receive_all(link: Link) -> None:
        while True:
            received.append((await link.receive()).message)

    async with listening(transport, lambda channel: _in_link(channel, receive_all)) as port:
        async with transport.dial(HOST, port, timeout=1) as channel, open_link(channel) as link:
            for number in range(100):
                await link.send(PeerLost(number, ""))
        await trio.testing.wait_all_tasks_blocked()
    assert len(received) == 100


async def _in_link(channel: Channel, body: Callable[[Link], Awaitable[None]]) -> None:
    async with open_link(channel) as link:
        await body(link)


@pytest.mark.parametrize("last_words", [True, False])
async def test_a_peer_that_reads_nothing_delays_the_end_by_a_second_at_most(
    transport: MemoryTransport, autojump_clock: MockClock, last_words: bool
) -> None:
    async def read_nothing(channel: Channel) -> None:
        await trio.sleep_forever()

    async with listening(transport, read_nothing) as port, transport.dial(HOST, port, timeout=1) as channel:
        async with open_link(channel) as link:
            for _ in range(100):
                await link.send(Error("end", ""))
            began = trio.current_time()
            if last_words:
                await link.end_with(Error("end", "the last"))
        assert 1 <= trio.current_time() - began <= 2


async def test_the_queue_is_bounded(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async def read_nothing(channel: Channel) -> None:
        await trio.sleep_forever()

    sent = 0
    async with listening(transport, read_nothing) as port, transport.dial(HOST, port, timeout=1) as channel:
        with trio.move_on_after(WRITE_SECONDS / 2) as waited:
            async with open_link(channel) as link:
                while True:
                    await link.send(Error("end", ""))
                    sent += 1
    assert waited.cancelled_caught
    assert 256 <= sent <= 256 + BUFFERED_MESSAGES + 1


async def test_a_full_queue_stops_no_receiver(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    """Its heartbeats are left out, and what the peer says is still heard."""

    async def talk(channel: Channel) -> None:
        for number in range(20):
            await channel.send(frame(PeerLost(number, "")))
            await channel.send(frame(Ping(1)))
            await trio.sleep(1)

    async with (
        listening(transport, talk) as port,
        transport.dial(HOST, port, timeout=1) as channel,
        trio.open_nursery() as nursery,
    ):
        with trio.move_on_after(FOREVER):
            async with open_link(channel) as link:
                for _ in range(300):
                    nursery.start_soon(_send_ignoring_the_end, link)
                for number in range(20):
                    assert (await link.receive()).message == PeerLost(number, "")


async def _send_ignoring_the_end(link: Link) -> None:
    with pytest.raises(ChannelClosed):
        while True:
            await link.send(Error("end", ""))


async def test_a_sender_that_waits_learns_of_the_end(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async def read_nothing(channel: Channel) -> None:
        await trio.sleep_forever()

    async with (
        listening(transport, read_nothing) as port,
        transport.dial(HOST, port, timeout=1) as channel,
        trio.open_nursery() as nursery,
        open_link(channel) as link,
    ):
        nursery.start_soon(_send_ignoring_the_end, link)
        await trio.testing.wait_all_tasks_blocked()
        transport.sever(port)
        await trio.testing.wait_all_tasks_blocked()


async def test_a_cancelled_user_leaves_no_task(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async with listening(transport, lambda channel: _in_link(channel, echo)) as port:
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        with trio.move_on_after(3.3) as scope:
            async with transport.dial(HOST, port, timeout=1) as channel, open_link(channel) as link:
                await link.send(Error("end", ""))
                await keep_receiving(link)
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before


@pytest.mark.parametrize("failure", [ValueError("mine"), ChannelClosed("mine"), KeyError(1)], ids=repr)
async def test_an_exception_in_the_body_comes_out_as_itself(
    transport: MemoryTransport, autojump_clock: MockClock, failure: Exception
) -> None:
    async with (
        listening(transport, lambda channel: _in_link(channel, echo)) as port,
        transport.dial(HOST, port, timeout=1) as channel,
    ):
        with pytest.raises(type(failure)) as caught:
            async with open_link(channel):
                raise failure
        assert caught.value is failure


async def test_garbage_is_a_protocol_error_for_the_receiver(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    seen: list[CoreError] = []

    async def receive(link: Link) -> None:
        try:
            await link.receive()
        except ProtocolError as error:
            seen.append(error)
            raise

    for nonsense in (b"garbage", frame(Chunk(b"x"))):
        async with bare(transport, receive) as channel:
            await channel.send(nonsense)
            with pytest.raises(ChannelClosed):
                while True:
                    await channel.receive()
    assert len(seen) == 2


async def test_a_handshake_has_a_deadline(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    """Heartbeats are no answer."""
    async with linked(transport, keep_receiving) as (link, _):
        began = trio.current_time()
        with trio.fail_after(FOREVER), pytest.raises(ChannelClosed, match="did not say who it is"):
            await first_message(link)
        assert trio.current_time() - began == pytest.approx(HANDSHAKE_SECONDS)


def test_the_sole_error_of_a_group_is_what_is_inside() -> None:
    inner = ChannelClosed("x")
    assert sole_error(inner) is inner
    assert sole_error(ExceptionGroup("", [inner])) is inner
    assert sole_error(ExceptionGroup("", [ExceptionGroup("", [ExceptionGroup("", [inner])])])) is inner
    other = ValueError()
    assert sole_error(ExceptionGroup("", [other])) is other
    assert sole_error(ExceptionGroup("", [other, ExceptionGroup("", [inner, KeyError()])])) is inner


def test_several_errors_that_are_not_ours_stay_a_group() -> None:
    group = ExceptionGroup("", [ValueError(), KeyError()])
    assert sole_error(group) is group
    assert sole_error(ExceptionGroup("outer", [group])) is group
