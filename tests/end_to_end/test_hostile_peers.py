"""Whatever is sent to the ports where nodes meet, an answer that is under way comes out as if nothing had happened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgpack
import pytest
import trio
import trio_websocket

import core
from core.protocol.codec import Decoder, Packet, encode
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    ClearCache,
    Error,
    Hello,
    HelloAck,
    HiddenState,
    InferenceError,
    Message,
    PeerHello,
    PeerLost,
    Ping,
    RunPrefill,
)
from core.testing.cluster import COORDINATOR, Cluster

SECONDS = 300
PROMPT = "The layers of one model lie on several machines."
TOKENS = 200
Streaming = Callable[..., Any]


def ports(cluster: Cluster) -> dict[str, int]:
    """Where the coordinator and each node listen for nodes."""
    listening = {
        name: [connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"]
        for name, process in cluster.processes().items()
    }
    return {name: cluster.node_port if name == COORDINATOR else numbers[0] for name, numbers in listening.items()}


def frame(kind: str, payload: Any, **more: Any) -> bytes:
    packed: bytes = msgpack.packb({"type": kind, "request_id": "", "seq": 1, "payload": payload, **more})
    return packed


def frames_of(message: Message) -> list[bytes]:
    return list(encode(Packet(message, "1", 1)))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


NOT_WEBSOCKETS = {
    "zeros": bytes(100_000),
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "a web page's request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an endless header": b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
}
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
NOT_FRAMES = {
    "a length of 2^62": b"\x82\xff" + (2**62).to_bytes(8, "big") + b"mask" + b"x" * 1000,
    "no mask": b"\x82\x05hello",
    "a reserved opcode": b"\x8f\x80mask",
}
NOT_MESSAGES = {
    "random bytes": b"\xc1" + bytes(range(256)),
    "nothing": b"",
    "more than a message may be": bytes(3 * 1024 * 1024),
    "an unknown type": frame("MAKE_COFFEE", {}),
    "a field too much": frame("PING", {"sent_us": 1}, extra=1),
    "a negative count": frame("PING", {"sent_us": -1}),
    "a name of a megabyte": frame("HELLO", {"protocol": PROTOCOL_VERSION, "node_id": "x" * 900_000}),
    "a deep nest": nested(500_000),
    "a batch before any greeting": frames_of(RunPrefill(1, [Segment(1, 0, 1, 1)], Tensor("fp32", 1, 64, bytes(256))))[
        0
    ],
    "a tensor of a terabyte": frame(
        "HIDDEN_STATE", {"epoch": 1, "hidden": ["fp32", 2**20, 2**18, b""], "compute_us": []}
    ),
    "a heartbeat alone": frames_of(Ping(1))[0],
    "a peer's greeting with a wrong token": frames_of(PeerHello(PROTOCOL_VERSION, 1, bytes(32)))[0],
}


@asynccontextmanager
async def websocket(port: int) -> AsyncIterator[trio_websocket.WebSocketConnection]:
    async with trio_websocket.open_websocket("127.0.0.1", port, "/", use_ssl=False) as socket:
        yield socket


async def send_bytes(port: int, *data: bytes) -> None:
    """Sends, and waits for the other side to close."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(SECONDS), suppress(trio.BrokenResourceError):
            for each in data:
                await stream.send_all(each)
            while await stream.receive_some():
                pass


async def messages_of(socket: trio_websocket.WebSocketConnection) -> list[Message]:
    """What comes until the other side closes."""
    decoder, messages = Decoder(), []
    with trio.fail_after(SECONDS):
        try:
            while True:
                packet = decoder.feed(await socket.get_message())
                if packet is not None and not isinstance(packet.message, Ping):
                    messages.append(packet.message)
        except trio_websocket.ConnectionClosed:
            return messages


async def send_message(port: int, data: bytes) -> None:
    async with websocket(port) as socket:
        try:
            await socket.send_message(data)
        except trio_websocket.ConnectionClosed:
            return
        assert not [each for each in await messages_of(socket) if isinstance(each, HelloAck)]


Attack = Callable[[int], Awaitable[None]]


def attacks() -> list[Attack]:
    def plain(data: bytes) -> Attack:
        return lambda port: send_bytes(port, data)

    def upgraded(data: bytes) -> Attack:
        return lambda port: send_bytes(port, UPGRADE, data)

    def message(data: bytes) -> Attack:
        return lambda port: send_message(port, data)

    return [
        *map(plain, NOT_WEBSOCKETS.values()),
        *map(upgraded, NOT_FRAMES.values()),
        *map(message, NOT_MESSAGES.values()),
    ]


@pytest.fixture
async def undisturbed(pair: Cluster, oracle: Any, streaming: Streaming) -> AsyncIterator[None]:
    """An answer is under way at every moment of the test, and each comes out right, all on one route."""
    over = trio.Event()

    async def ask() -> str:
        async with streaming(pair, PROMPT, max_tokens=TOKENS) as events:
            return "".join([event["choices"][0]["text"] async for event in events])

    async def ask_until_it_is_over() -> None:
        while not over.is_set():
            assert await ask() == expected

    expected = await ask()
    oracle.check(expected, oracle.encode(PROMPT), TOKENS)
    epoch = (await pair.status())["route_epoch"]
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask_until_it_is_over)
        await pair.wait_until(lambda status: status["sessions"] == 2)
        yield
        over.set()
    assert (await pair.status())["route_epoch"] == epoch


async def test_nonsense_disturbs_nobody(pair: Cluster, undisturbed: None) -> None:
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for port in ports(pair).values():
                for attack in attacks():
                    nursery.start_soon(attack, port)


async def test_a_node_of_another_version_is_told_both_versions(pair: Cluster, undisturbed: None) -> None:
    with trio.fail_after(SECONDS):
        async with websocket(pair.node_port) as socket:
            for each in frames_of(Hello(99, "from the future", core_version="99.0")):
                await socket.send_message(each)
            (refusal,) = await messages_of(socket)
    assert isinstance(refusal, Error)
    assert refusal.code == "protocol_version"
    assert f"protocol {PROTOCOL_VERSION} (core {core.__version__})" in refusal.message
    assert "protocol 99 (core 99.0)" in refusal.message


LIES: dict[str, Callable[[int], Message]] = {
    "a false answer": lambda epoch: HiddenState(epoch, Tensor("fp32", 1, 64, bytes(256))),
    "a false failure": lambda epoch: InferenceError(epoch, "it is broken"),
    "a false alarm": lambda epoch: PeerLost(epoch, "it is gone"),
    "a false order": lambda epoch: ClearCache(epoch, [1, 2, 3]),
    "a second greeting": lambda epoch: Hello(PROTOCOL_VERSION, "one"),
}


async def test_a_member_that_speaks_for_others_is_cut_off(pair: Cluster, undisturbed: None) -> None:
    with trio.fail_after(SECONDS):
        epoch = (await pair.status())["route_epoch"]
        for what, lie in LIES.items():
            async with websocket(pair.node_port) as socket:
                for each in (*frames_of(Hello(PROTOCOL_VERSION, what)), *frames_of(lie(epoch))):
                    await socket.send_message(each)
                answers = await messages_of(socket)
            assert isinstance(answers[0], HelloAck)
            assert isinstance(answers[-1], Error), what
            assert answers[-1].code == "protocol"
