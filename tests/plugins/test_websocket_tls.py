"""TLS by pinned certificate: nothing goes to another machine, and nothing can be read on the way."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from core_plugin_websocket.transport import TrioWebsocketTransport
from trio.testing import MockClock

from core import Channel, ChannelClosed, Handler, TrustError
from core.testing.contracts import HOST, TransportContract, echo, listening
from core.trust.identity import Identity

SECONDS = 300
HANDSHAKE_SECONDS = 100
PLAIN = b"a hidden state that nobody may read" * 20
IDENTITY = Identity.fresh()
BEGUN = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03"


class Encrypted(TrioWebsocketTransport):
    """As it is between machines."""

    async def listen(self, host: str, port: int, handler: Handler, **options: Any) -> None:
        await super().listen(host, port, handler, **{"credentials": IDENTITY.credentials(), **options})

    def dial(self, host: str, port: int, **options: Any) -> AbstractAsyncContextManager[Channel]:
        return super().dial(host, port, **{"pin": IDENTITY.fingerprint, **options})


class TestEncryptedWebsocket(TransportContract):
    @pytest.fixture
    def transport(self) -> Encrypted:
        return Encrypted()


@pytest.fixture
def transport() -> Encrypted:
    return Encrypted(handshake_timeout=HANDSHAKE_SECONDS)


@pytest.fixture
def clock() -> MockClock:
    """Runs as a real one does, and can be put forward."""
    return MockClock(rate=1.0)


@asynccontextmanager
async def tapped(port: int) -> AsyncIterator[tuple[int, bytearray]]:
    """A relay to `port`, and all bytes that pass through it in either direction."""
    seen = bytearray()

    async def relay(near: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream(HOST, port) as far, trio.open_nursery() as nursery:
            nursery.start_soon(copy, near, far)
            nursery.start_soon(copy, far, near)

    async def copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                seen.extend(data)
                await target.send_all(data)
            await target.send_eof()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host=HOST)
        nursery.start_soon(trio.serve_listeners, relay, listeners)
        yield listeners[0].socket.getsockname()[1], seen
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("size", [100, 200_000])
async def test_whoever_listens_on_the_way_reads_nothing(transport: Encrypted, size: int) -> None:
    message = (PLAIN * (size // len(PLAIN) + 1))[:size]
    with trio.fail_after(SECONDS):
        async with listening(transport, echo) as port, tapped(port) as (tap, seen):
            async with transport.dial(HOST, tap, timeout=SECONDS) as channel:
                for _ in range(3):
                    await channel.send(message)
                    assert await channel.receive() == message
            assert len(seen) > 6 * size
            for plain in (PLAIN[:30], b"Upgrade", b"websocket", b"GET /"):
                assert plain not in seen


async def test_another_machine_gets_nothing_but_the_handshake(transport: Encrypted) -> None:
    got: list[bytes] = []
    over = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        secured = trio.SSLStream(stream, Identity.fresh().credentials().context, server_side=True)
        with suppress(trio.BrokenResourceError):
            await secured.do_handshake()
            got.append(b"shaken hands")
            got.append(bytes(await secured.receive_some()))
        over.set()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host=HOST)
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            with pytest.raises(TrustError, match="is not the machine that was expected"):
                async with transport.dial(HOST, listeners[0].socket.getsockname()[1], timeout=SECONDS):
                    pytest.fail("it is connected")
            await over.wait()
            nursery.cancel_scope.cancel()
    assert got in ([b"shaken hands"], [b"shaken hands", b""])


async def test_a_listener_without_credentials_is_no_use(transport: Encrypted) -> None:
    with trio.fail_after(SECONDS):
        async with listening(TrioWebsocketTransport(), echo) as port:
            with pytest.raises(ChannelClosed, match="no encrypted connection"):
                async with transport.dial(HOST, port, timeout=SECONDS):
                    pytest.fail("it is connected")


async def test_only_tls_1_3_is_spoken(transport: Encrypted) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with trio.fail_after(SECONDS):
        async with listening(transport, echo) as port:
            stream = trio.SSLStream(await trio.open_tcp_stream(HOST, port), context)
            with pytest.raises(trio.BrokenResourceError):
                await stream.do_handshake()


@pytest.mark.parametrize("first", [b"", b"\x16", BEGUN, b"\x16" + bytes(5000)], ids=["none", "one", "some", "wrong"])
async def test_a_handshake_that_is_not_finished_ends_in_time_and_holds_up_nobody(
    transport: Encrypted, first: bytes, clock: MockClock
) -> None:
    with trio.fail_after(SECONDS):
        async with listening(transport, echo) as port, await trio.open_tcp_stream(HOST, port) as hanging:
            if first:
                await hanging.send_all(first)
            async with transport.dial(HOST, port, timeout=SECONDS) as channel:
                await channel.send(b"hello")
                assert await channel.receive() == b"hello"
            clock.jump(HANDSHAKE_SECONDS)
            with suppress(trio.BrokenResourceError):
                while await hanging.receive_some():
                    pass


async def test_a_server_that_never_shakes_hands_is_given_up(transport: Encrypted) -> None:
    with trio.fail_after(SECONDS), socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ChannelClosed, match="in time"):
            async with transport.dial(HOST, port, timeout=0.2):
                pytest.fail("it is connected")


async def test_there_is_no_way_past_the_event_loop(transport: Encrypted) -> None:
    with trio.fail_after(SECONDS):
        async with listening(transport, echo) as port, transport.dial(HOST, port, timeout=SECONDS) as channel:
            assert not channel.send_now(b"hello")
            await channel.send(b"after all")
            assert await channel.receive() == b"after all"
