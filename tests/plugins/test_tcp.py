"""The tcp transport keeps the contract, plain and encrypted, and a hostile or broken peer ends its own connection."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import core_plugin_tcp
import pytest
import trio
import trio.testing
from core_plugin_tcp.framing import LengthPrefixed
from core_plugin_tcp.transport import GREETING, MAX_MESSAGE, PlainTcpTransport
from core_plugin_websocket.transport import TrioWebsocketTransport

from core import Channel, ChannelClosed, Handler
from core.interfaces.transport import GREETING_BYTES
from core.plugins import PluginHost
from core.tcp import Goodbye, Limits
from core.testing.contracts import HOST, TransportContract, echo, listening
from core.trust.identity import Identity

PATIENCE = 300
IDENTITY = Identity.fresh()
GOODBYE = b"\xff\xff\xff\xff"


class Encrypted(PlainTcpTransport):
    """As it is between machines."""

    async def listen(self, host: str, port: int, handler: Handler, **options: Any) -> None:
        await super().listen(host, port, handler, **{"credentials": IDENTITY.credentials(), **options})

    def dial(self, host: str, port: int, **options: Any) -> AbstractAsyncContextManager[Channel]:
        return super().dial(host, port, **{"pin": IDENTITY.fingerprint, **options})


class TestTcp(TransportContract):
    @pytest.fixture
    def transport(self) -> PlainTcpTransport:
        return PlainTcpTransport()


class TestEncryptedTcp(TransportContract):
    @pytest.fixture
    def transport(self) -> Encrypted:
        return Encrypted()


@pytest.fixture
def transport() -> PlainTcpTransport:
    return PlainTcpTransport(handshake_timeout=PATIENCE)


def framed(message: bytes) -> bytes:
    return struct.pack("!I", len(message)) + message


async def read_to_end(stream: trio.abc.Stream) -> bytes:
    """All that comes until the other end closes, politely or not."""
    received = b""
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some(65_536):
            received += data
    return received


async def read_exactly(stream: trio.abc.Stream, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += await stream.receive_some(size - len(received))
    return received


async def greeted(port: int) -> trio.SocketStream:
    """A raw connection that the server takes for a peer's."""
    stream = await trio.open_tcp_stream(HOST, port)
    await stream.send_all(GREETING)
    assert await read_exactly(stream, len(GREETING)) == GREETING
    return stream


async def assert_still_serves(transport: PlainTcpTransport, port: int) -> None:
    async with transport.dial(HOST, port, timeout=PATIENCE) as channel:
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


def test_the_plugin_adds_the_transport() -> None:
    host = PluginHost()
    host.register(core_plugin_tcp, "tcp")
    assert isinstance(host.transports.get("tcp"), PlainTcpTransport)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_messages_come_whole_however_the_bytes_do(size: int) -> None:
    messages = [b"", b"one", bytes(300), b"\xff" * 4, b"last"]
    bytes_, frames = b"".join(map(framed, messages)), LengthPrefixed(b"", MAX_MESSAGE)
    received = []
    for start in range(0, len(bytes_), size):
        frames.feed(bytes_[start : start + size])
        while (message := frames.next_message()) is not None:
            received.append(message)
    assert received == messages
    assert [frames.frame(message) for message in messages] == [framed(message) for message in messages]
    assert frames.goodbye() == GOODBYE


def test_what_is_too_large_is_refused_before_it_has_come() -> None:
    LengthPrefixed(struct.pack("!I", 100), 100).next_message()
    with pytest.raises(Goodbye, match="larger than 100 bytes"):
        LengthPrefixed(struct.pack("!I", 101), 100).next_message()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00" + bytes(512),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + GREETING + framed(b"from a web page"),
        GREETING.replace(b"1", b"2"),
        b"x" * 100_000,
    ],
    ids=["tls", "http", "a web page", "another version", "endless line"],
)
async def test_garbage_instead_of_a_greeting_is_not_answered(transport: PlainTcpTransport, garbage: bytes) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port:
            async with await trio.open_tcp_stream(HOST, port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(garbage)
                assert await read_to_end(stream) == b""
            await assert_still_serves(transport, port)


@pytest.mark.parametrize("begun", [b"", GREETING[:4]])
async def test_a_handshake_that_stays_half_open_is_ended_and_holds_up_nobody(
    transport: PlainTcpTransport, begun: bytes
) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, await trio.open_tcp_stream(HOST, port) as stream:
            if begun:
                await stream.send_all(begun)
            await assert_still_serves(transport, port)
        hasty = PlainTcpTransport(handshake_timeout=0.05)
        async with listening(hasty, echo) as port, await trio.open_tcp_stream(HOST, port) as stream:
            if begun:
                await stream.send_all(begun)
            assert await read_to_end(stream) == b""


async def test_a_greeting_in_pieces_and_a_message_right_behind_it_are_understood(transport: PlainTcpTransport) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, await trio.open_tcp_stream(HOST, port) as stream:
            for byte in GREETING[:-1]:
                await stream.send_all(bytes([byte]))
            await stream.send_all(GREETING[-1:] + framed(b"at once"))
            expected = GREETING + framed(b"at once")
            assert await read_exactly(stream, len(expected)) == expected


async def test_a_frame_that_claims_to_be_huge_is_cut_off(transport: PlainTcpTransport) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, await greeted(port) as stream:
            await stream.send_all(struct.pack("!I", 2**31))
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await stream.send_all(bytes(65_536))


async def test_a_stranger_that_announces_more_than_a_greeting_is_cut_off_by_the_header(
    transport: PlainTcpTransport,
) -> None:
    """A channel that nobody has settled yet; once it is, as much is taken as of anybody."""
    proven = trio.Event()

    async def serve(channel: Channel) -> None:
        await channel.send(await channel.receive())
        channel.settled()
        proven.set()
        await echo(channel)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(transport.listen, HOST, 0, serve)
            async with await greeted(port) as stream:
                await stream.send_all(struct.pack("!I", GREETING_BYTES + 1))
                assert await read_to_end(stream) == GOODBYE
            async with transport.dial(HOST, port, timeout=5) as channel:
                for size in (GREETING_BYTES, transport.max_message):
                    await channel.send(bytes(size))
                    assert len(await channel.receive()) == size
                    await proven.wait()
            nursery.cancel_scope.cancel()


async def test_a_peer_that_breaks_off_said_no_goodbye(transport: PlainTcpTransport) -> None:
    told = []

    async def serve(channel: Channel) -> None:
        with pytest.raises(ChannelClosed) as caught:
            await channel.receive()
        told.append(caught.value.message)

    with trio.fail_after(PATIENCE):
        for last in (b"", framed(b"x" * 100)[:50], GOODBYE):
            async with listening(transport, serve) as port, await greeted(port) as stream:
                if last:
                    await stream.send_all(last)
                await stream.send_eof()
                rest = await read_to_end(stream)
            assert rest == (GOODBYE if last == GOODBYE else b"")
    assert told == ["it broke off without a goodbye", "it broke off without a goodbye", "it was closed"]


async def test_what_nobody_receives_waits_with_its_sender(transport: PlainTcpTransport) -> None:
    async def idle(channel: Channel) -> None:
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        async with listening(transport, idle) as port, await greeted(port) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(64 * transport.max_message))
            await trio.testing.wait_all_tasks_blocked(cushion=0.05)
            assert nursery.child_tasks
            nursery.cancel_scope.cancel()


async def test_no_more_connections_than_the_limit() -> None:
    transport = PlainTcpTransport(limits=Limits(connections=1))
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, transport.dial(HOST, port, timeout=PATIENCE) as first:
            with pytest.raises(ChannelClosed, match="during the handshake"):
                async with transport.dial(HOST, port, timeout=PATIENCE):
                    pass
            await first.send(b"still here")
            assert await first.receive() == b"still here"


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536])
async def test_what_is_sent_past_the_event_loop_arrives_whole_and_in_order(
    transport: PlainTcpTransport, size: int
) -> None:
    data = random.Random(size).randbytes(size)

    async def answer(channel: Channel) -> None:
        assert await channel.receive() == data
        assert await trio.to_thread.run_sync(channel.send_now, data)
        await channel.send(b"and the usual way")

    with trio.fail_after(PATIENCE):
        async with listening(transport, answer) as port, transport.dial(HOST, port, timeout=PATIENCE) as channel:
            assert await trio.to_thread.run_sync(channel.send_now, data)
            assert await channel.receive() == data
            assert await channel.receive() == b"and the usual way"
            assert not channel.send_now(bytes(65_537))
        assert not channel.send_now(b"it is closed")


async def test_an_encrypted_channel_has_no_way_past_the_event_loop() -> None:
    with trio.fail_after(PATIENCE):
        async with listening(Encrypted(), echo) as port, Encrypted().dial(HOST, port, timeout=PATIENCE) as channel:
            assert not channel.send_now(b"hello")


@pytest.mark.parametrize(
    ("answer", "timeout", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", PATIENCE, "it speaks something else"),
        (b"", PATIENCE, "closed the connection during the handshake"),
        (None, 0.05, "did not finish the handshake in time"),
    ],
    ids=["http", "closes", "silent"],
)
async def test_dial_says_what_a_server_of_another_kind_did(
    transport: PlainTcpTransport, answer: bytes | None, timeout: float, said: str
) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        if answer is None:
            await trio.sleep_forever()
        await stream.send_all(answer or b"")

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host=HOST)
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(ChannelClosed, match=said) as caught:
                async with transport.dial(HOST, port, timeout=timeout):
                    pass
            nursery.cancel_scope.cancel()
    assert f"{HOST}:{port}" in caught.value.title
    assert "--transport" in caught.value.hint


async def test_two_kinds_of_transport_do_not_understand_each_other(transport: PlainTcpTransport) -> None:
    other = TrioWebsocketTransport(handshake_timeout=PATIENCE)
    with trio.fail_after(PATIENCE):
        for listener, dialler in ((transport, other), (other, transport)):
            async with listening(listener, echo) as port:
                with pytest.raises(ChannelClosed):
                    async with dialler.dial(HOST, port, timeout=0.2):
                        pytest.fail("it is connected")
                async with listener.dial(HOST, port, timeout=PATIENCE) as channel:
                    await channel.send(b"hello")
                    assert await channel.receive() == b"hello"


async def test_nothing_of_the_protocol_is_read_on_the_way_or_goes_to_another_machine() -> None:
    got = bytearray()

    async def tap(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in stream:
                got.extend(data)

    with trio.fail_after(PATIENCE), socket.create_server((HOST, 0)):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host=HOST)
            nursery.start_soon(trio.serve_listeners, tap, listeners)
            with pytest.raises(ChannelClosed, match="in time"):
                async with Encrypted().dial(HOST, listeners[0].socket.getsockname()[1], timeout=0.2):
                    pytest.fail("it is connected")
            nursery.cancel_scope.cancel()
    assert got.startswith(b"\x16\x03")
    assert GREETING not in got
