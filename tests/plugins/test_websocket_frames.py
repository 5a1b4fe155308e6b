"""The frames that the transport reads and makes itself are those of RFC 6455, as wsproto and trio_websocket know it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
import trio
import trio_websocket
from core_plugin_websocket.framing import Frames, Goodbye, binary_frame, masked
from core_plugin_websocket.transport import TrioWebsocketTransport
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from core import Channel
from core.errors import ChannelClosed
from core.testing.contracts import HOST, echo, listening

PATIENCE = 300
LIMIT = 100_000
SIZES = (0, 1, 125, 126, 65_535, 65_536)
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
both_ends = pytest.mark.parametrize("client", [True, False], ids=["client", "server"])


class End:
    """Frames of one end, and wsproto at the other."""

    def __init__(self, *, client: bool) -> None:
        self.pongs: list[bytes] = []
        self.frames = Frames(b"", client=client, limit=LIMIT, on_ping=self.pongs.append)
        self.other = Connection(ConnectionType.SERVER if client else ConnectionType.CLIENT)

    def feed(self, *events: Event) -> None:
        for event in events:
            self.frames.feed(self.other.send(event))

    def messages(self) -> Iterator[bytes]:
        while (message := self.frames.next_message()) is not None:
            yield message

    def ended(self) -> Goodbye:
        with pytest.raises(Goodbye) as caught:
            self.frames.next_message()
        return caught.value


def pieces(data: bytes, numbers: random.Random) -> Iterator[bytes]:
    while data:
        size = numbers.choice([1, 2, 3, 9, 1000, 50_000])
        yield data[:size]
        data = data[size:]


@both_ends
def test_a_ping_to_an_end_that_is_closing_needs_no_answer(client: bool) -> None:
    end = End(client=client)
    end.feed(Ping(b"before"))
    assert list(end.messages()) == []
    assert len(end.pongs) == 1
    end.frames.goodbye()
    end.feed(Ping(b"after"), BytesMessage(b"on its way"))
    assert list(end.messages()) == [b"on its way"]
    assert len(end.pongs) == 1


@both_ends
@pytest.mark.parametrize("seed", range(20))
def test_any_messages_in_any_fragments_are_read_from_any_pieces(client: bool, seed: int) -> None:
    numbers, end, sent, stream, pings = random.Random(seed), End(client=client), [], b"", 0
    for _ in range(20):
        message = numbers.randbytes(numbers.choice(SIZES))
        sent.append(message)
        *fragments, last = pieces(message, numbers) if message and numbers.random() < 0.5 else (message,)
        for fragment in fragments:
            stream += end.other.send(BytesMessage(fragment, message_finished=False))
            if numbers.random() < 0.2:
                stream += end.other.send(Ping(str(pings).encode()))
                pings += 1
        stream += end.other.send(BytesMessage(last)) + end.other.send(Pong(b"unasked"))
    received = []
    for piece in pieces(stream, numbers):
        end.frames.feed(piece)
        received += end.messages()
    assert received == sent
    for pong in end.pongs:
        end.other.receive_data(pong)
    assert list(end.other.events()) == [Pong(str(number).encode()) for number in range(pings)]


@both_ends
@pytest.mark.parametrize("size", SIZES)
def test_wsproto_reads_what_is_sent(client: bool, size: int) -> None:
    data = random.Random(size).randbytes(size)
    other = End(client=client).other
    other.receive_data(binary_frame(data, client=client))
    assert list(other.events()) == [BytesMessage(data)]


@pytest.mark.parametrize("size", [*range(10), 8191, 8192, 8193, 8194, 70_001])
def test_masking_repeats_the_key_and_undoes_itself(size: int) -> None:
    data, key = random.Random(size).randbytes(size), bytes([1, 2, 4, 128])
    assert masked(data, key) == bytes(byte ^ key[index % 4] for index, byte in enumerate(data))
    assert masked(masked(data, key), key) == data


@both_ends
def test_the_limit_holds_for_a_message_and_for_all_its_fragments(client: bool) -> None:
    end = End(client=client)
    end.feed(BytesMessage(bytes(LIMIT)))
    assert next(end.messages()) == bytes(LIMIT)
    end.feed(BytesMessage(bytes(LIMIT), message_finished=False), BytesMessage(b"x"))
    assert end.ended().reason.code == 1009
    end = End(client=client)
    end.frames.feed(end.other.send(BytesMessage(bytes(LIMIT + 1)))[:20])
    assert end.ended().reason.code == 1009, "before it has come"


@both_ends
@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((CloseConnection(1000, "bye"),), 1000),
        ((CloseConnection(4321, "a reason of its own"),), 4321),
        ((TextMessage("x"),), 1003),
    ],
    ids=["close", "own code", "text"],
)
def test_the_other_end_is_told_why_it_ended(client: bool, events: tuple[Event, ...], code: int) -> None:
    end = End(client=client)
    end.feed(*events)
    goodbye = end.ended()
    assert goodbye.reason.code == code
    end.other.receive_data(goodbye.answer)
    [answer] = end.other.events()
    assert isinstance(answer, CloseConnection)
    assert answer.code == code


@both_ends
def test_a_message_within_another_is_refused(client: bool) -> None:
    end = End(client=client)
    end.feed(BytesMessage(b"", message_finished=False))
    end.frames.feed(binary_frame(b"x", client=not client))
    assert end.ended().reason.code == 1002


@both_ends
def test_a_frame_that_is_masked_by_the_wrong_end_is_refused(client: bool) -> None:
    end = End(client=client)
    end.frames.feed(binary_frame(b"hello", client=client))
    assert end.ended().reason.code == 1002


@both_ends
def test_an_answered_close_needs_no_answer(client: bool) -> None:
    end = End(client=client)
    end.other.receive_data(end.frames.goodbye())
    [close] = end.other.events()
    assert close.code == 1000
    end.feed(close.response())
    assert end.ended().answer == b""


async def test_a_plain_client_is_served() -> None:
    """Pings included; and it sees a close for what it is."""
    heard = trio.Event()

    async def serve(channel: Channel) -> None:
        await channel.send(await channel.receive())
        assert await channel.receive() == b"the end"
        heard.set()

    with trio.fail_after(PATIENCE):
        async with (
            listening(TrioWebsocketTransport(), serve) as port,
            trio_websocket.open_websocket(HOST, port, "/", use_ssl=False) as client,
        ):
            await client.send_message(b"hello")
            assert await client.get_message() == b"hello"
            await client.ping(b"still there?")
            await client.send_message(b"the end")
            with pytest.raises(trio_websocket.ConnectionClosed) as caught:
                await client.get_message()
            assert caught.value.reason.code == 1000
            assert heard.is_set()


async def test_a_plain_server_is_talked_to() -> None:
    async def serve(request: trio_websocket.WebSocketRequest) -> None:
        server = await request.accept()
        await server.send_message(await server.get_message())
        await server.ping(b"still there?")
        await server.aclose(4321, "enough")

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(trio_websocket.serve_websocket, serve, HOST, 0, None)
            async with TrioWebsocketTransport().dial(HOST, server.port, timeout=PATIENCE) as channel:
                await channel.send(b"hello")
                assert await channel.receive() == b"hello"
                with pytest.raises(ChannelClosed, match=r"4321.*enough"):
                    await channel.receive()
            nursery.cancel_scope.cancel()


async def test_what_comes_right_behind_the_handshake_is_heard() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        server = WSConnection(ConnectionType.SERVER)
        server.receive_data(await stream.receive_some())
        await stream.send_all(server.send(AcceptConnection()) + server.send(BytesMessage(b"at once")))
        await stream.receive_some()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host=HOST))
            port = listener.socket.getsockname()[1]
            async with TrioWebsocketTransport().dial(HOST, port, timeout=PATIENCE) as channel:
                assert await channel.receive() == b"at once"
            nursery.cancel_scope.cancel()
        async with (
            listening(TrioWebsocketTransport(), echo) as port,
            await trio.open_tcp_stream(HOST, port) as stream,
        ):
            await stream.send_all(UPGRADE + binary_frame(b"at once", client=True))
            answer = b""
            while not answer.endswith(binary_frame(b"at once", client=False)):
                answer += await stream.receive_some()


async def test_a_handshake_in_pieces_is_understood() -> None:
    with trio.fail_after(PATIENCE):
        async with (
            listening(TrioWebsocketTransport(), echo) as port,
            await trio.open_tcp_stream(HOST, port) as stream,
        ):
            for byte in UPGRADE:
                await stream.send_all(bytes([byte]))
            assert b" 101 " in await stream.receive_some()


async def test_a_peer_that_pings_and_reads_nothing_is_still_heard() -> None:
    heard = trio.Event()

    async def serve(channel: Channel) -> None:
        assert await channel.receive() == b"over"
        heard.set()

    ping = bytes([0x89, 0x80 | 125]) + bytes(4 + 125)
    with trio.fail_after(3 * PATIENCE):
        async with (
            listening(TrioWebsocketTransport(), serve) as port,
            await trio.open_tcp_stream(HOST, port) as stream,
        ):
            await stream.send_all(UPGRADE)
            for _ in range(30):
                await stream.send_all(ping * 1000)
            await stream.send_all(binary_frame(b"over", client=True))
            await heard.wait()


async def test_a_close_that_comes_while_messages_do_is_answered() -> None:
    """The receiver leaves, and what is still on its way is taken, so that the peer sees no broken connection."""
    closes = []

    async def serve(channel: Channel) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_receive_to_the_end, channel)
            await channel.aclose()

    with trio.fail_after(PATIENCE):
        async with (
            listening(TrioWebsocketTransport(), serve) as port,
            trio_websocket.open_websocket(HOST, port, "/", use_ssl=False) as client,
        ):
            with pytest.raises(trio_websocket.ConnectionClosed) as caught:
                while True:
                    await client.send_message(bytes(50_000))
            closes.append(caught.value.reason.code)
    assert closes == [1000]


async def _receive_to_the_end(channel: Channel) -> None:
    with suppress(ChannelClosed):
        while True:
            await channel.receive()
