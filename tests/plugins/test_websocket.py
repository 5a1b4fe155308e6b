"""The websocket transport keeps the contract, and a hostile or broken peer ends its own connection alone."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
from contextlib import suppress

import core_plugin_websocket
import pytest
import trio
import trio.testing
import trio_websocket
from core_plugin_websocket.transport import TrioWebsocketTransport

from core import Channel
from core.errors import ChannelClosed, ConfigError
from core.interfaces.transport import GREETING_BYTES
from core.plugins import PluginHost
from core.tcp import Limits
from core.testing.contracts import HOST, TransportContract, echo, listening

PATIENCE = 300
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class TestTrioWebsocket(TransportContract):
    @pytest.fixture
    def transport(self) -> TrioWebsocketTransport:
        return TrioWebsocketTransport()


@pytest.fixture
def transport() -> TrioWebsocketTransport:
    return TrioWebsocketTransport()


async def test_a_stranger_that_announces_more_than_a_greeting_is_cut_off_by_the_header(
    transport: TrioWebsocketTransport,
) -> None:
    """A channel that nobody has settled yet."""
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(transport.listen, HOST, 0, echo)
            async with await upgraded(port) as stream:
                await stream.send_all(struct.pack("!BBQ4x", 0x82, 0x80 | 127, GREETING_BYTES + 1))
                assert b"larger than 65536 bytes" in await read_to_end(stream)
            async with transport.dial(HOST, port, timeout=5) as channel:
                await channel.send(bytes(GREETING_BYTES))
                assert await channel.receive() == bytes(GREETING_BYTES)
            nursery.cancel_scope.cancel()


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """All that comes until the other end closes, politely or not."""
    received = b""
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some():
            received += data
    return received


async def upgraded(port: int) -> trio.SocketStream:
    """A raw connection that the server takes for a websocket."""
    stream = await trio.open_tcp_stream(HOST, port)
    await stream.send_all(UPGRADE)
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += await stream.receive_some()
    assert b" 101 " in answer
    return stream


async def assert_still_serves(transport: TrioWebsocketTransport, port: int) -> None:
    async with transport.dial(HOST, port, timeout=PATIENCE) as channel:
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


def test_the_plugin_adds_the_transport() -> None:
    host = PluginHost()
    host.register(core_plugin_websocket, "websocket")
    assert isinstance(host.transports.get("trio-websocket"), TrioWebsocketTransport)


def test_importing_changes_nothing() -> None:
    program = (
        "import sys, core_plugin_websocket; assert 'trio_websocket' not in sys.modules\n"
        "import core_plugin_websocket.transport; from wsproto import frame_protocol\n"
        "assert frame_protocol.XorMaskerSimple.__module__ == 'wsproto.frame_protocol'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


async def test_small_messages_are_not_held_back(transport: TrioWebsocketTransport) -> None:
    async def tell(channel):
        await channel.send(bytes([no_delay(channel)]))

    def no_delay(channel) -> bool:
        return bool(channel._connection.tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with trio.fail_after(PATIENCE):
        async with listening(transport, tell) as port, transport.dial(HOST, port, timeout=PATIENCE) as channel:
            assert no_delay(channel)
            assert await channel.receive() == b"\x01"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00" + bytes(512),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        UPGRADE.replace(b"GET", b"PUT"),
        UPGRADE.replace(b"Host: x", b"Host: xn--\xff"),
        b"x" * 100_000,
    ],
    ids=["tls", "no upgrade", "put", "host name", "endless line"],
)
async def test_garbage_instead_of_a_handshake_ends_its_own_connection(
    transport: TrioWebsocketTransport, garbage: bytes
) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port:
            async with await trio.open_tcp_stream(HOST, port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(garbage)
                await read_to_end(stream)
            await assert_still_serves(transport, port)


async def test_a_web_page_in_a_browser_on_this_machine_gets_no_websocket(transport: TrioWebsocketTransport) -> None:
    request = UPGRADE.replace(b"Host: x", b"Host: x\r\nOrigin: https://evil.example")
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port:
            async with await trio.open_tcp_stream(HOST, port) as stream:
                await stream.send_all(request)
                assert (await read_to_end(stream)).startswith(b"HTTP/1.1 403 ")
            await assert_still_serves(transport, port)


@pytest.mark.parametrize(
    "garbage",
    [UPGRADE, b"\xff" * 64, b"\x82\x05hello", b"\x80\x80AAAA", b"\x88\x81AAAA\x00", b"\x81\x81\x00\x00\x00\x00\xff"],
    ids=["http again", "bad opcode", "unmasked", "nothing to continue", "bad close", "bad utf-8"],
)
async def test_garbage_instead_of_frames_ends_its_own_connection(
    transport: TrioWebsocketTransport, garbage: bytes
) -> None:
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port:
            async with await upgraded(port) as stream:
                await stream.send_all(garbage)
                await read_to_end(stream)
            await assert_still_serves(transport, port)


async def test_a_frame_that_claims_to_be_huge_is_cut_off(transport: TrioWebsocketTransport) -> None:
    header = struct.pack("!BBQ4x", 0x82, 0xFF, 2**40)
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, await upgraded(port) as stream:
            await stream.send_all(header)
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await stream.send_all(bytes(65_536))


async def test_what_nobody_receives_waits_with_its_sender(transport: TrioWebsocketTransport) -> None:
    async def idle(channel: Channel) -> None:
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        async with listening(transport, idle) as port, await upgraded(port) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(64 * transport.max_message))
            await trio.testing.wait_all_tasks_blocked(cushion=0.05)
            assert nursery.child_tasks
            nursery.cancel_scope.cancel()


async def test_a_handshake_that_stays_half_open_is_ended() -> None:
    transport = TrioWebsocketTransport(handshake_timeout=0.05)
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port, await trio.open_tcp_stream(HOST, port) as stream:
            await stream.send_all(UPGRADE[:40])
            assert await read_to_end(stream) == b""


async def test_a_text_message_is_refused(transport: TrioWebsocketTransport) -> None:
    refusals = []

    async def serve(channel):
        with pytest.raises(ChannelClosed) as caught:
            await channel.receive()
        refusals.append(caught.value)

    with trio.fail_after(PATIENCE):
        async with (
            listening(transport, serve) as port,
            trio_websocket.open_websocket(HOST, port, "/", use_ssl=False) as client,
        ):
            await client.send_message("text")
            with pytest.raises(trio_websocket.ConnectionClosed):
                await client.get_message()
    assert "text" in refusals[0].message


async def test_no_more_connections_than_the_limit_and_a_seat_is_free_again_after_one() -> None:
    transport = TrioWebsocketTransport(limits=Limits(connections=1))
    with trio.fail_after(PATIENCE):
        async with listening(transport, echo) as port:
            async with transport.dial(HOST, port, timeout=PATIENCE) as first:
                with pytest.raises(ChannelClosed, match="during the handshake"):
                    async with transport.dial(HOST, port, timeout=PATIENCE):
                        pass
                await first.send(b"still here")
                assert await first.receive() == b"still here"
            while True:
                with suppress(ChannelClosed):
                    await assert_still_serves(transport, port)
                    break


async def test_a_send_that_is_cancelled_midway_ends_the_connection(transport: TrioWebsocketTransport) -> None:
    go_on = trio.Event()
    received = []

    async def serve(channel):
        await go_on.wait()
        with suppress(ChannelClosed):
            while True:
                received.append(await channel.receive())

    async def fill(channel):
        while True:
            await channel.send(message)

    message = bytes(range(256)) * 4096
    with trio.fail_after(PATIENCE):
        async with listening(transport, serve) as port, transport.dial(HOST, port, timeout=PATIENCE) as channel:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fill, channel)
                await trio.testing.wait_all_tasks_blocked(cushion=0.05)
                nursery.cancel_scope.cancel()
            with pytest.raises(ChannelClosed):
                await channel.send(message)
            go_on.set()
    assert all(whole == message for whole in received)


async def test_dial_says_that_the_connection_was_refused(transport: TrioWebsocketTransport) -> None:
    async with listening(transport, echo) as port:
        pass
    with pytest.raises(ChannelClosed, match="refused"):
        async with transport.dial(HOST, port, timeout=PATIENCE):
            pass


@pytest.mark.parametrize(
    ("host", "port", "said"), [("a" * 80, 80, "name is not known"), (HOST, 70_000, "a port is a number")]
)
async def test_dial_says_what_is_wrong_with_an_address(
    transport: TrioWebsocketTransport, host: str, port: int, said: str
) -> None:
    with pytest.raises(ChannelClosed, match=said):
        async with transport.dial(host, port, timeout=PATIENCE):
            pass


@pytest.mark.parametrize(
    ("answer", "timeout", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", PATIENCE, "HTTP status 404"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", PATIENCE, "does not speak the websocket protocol"),
        (b"", PATIENCE, "closed the connection during the handshake"),
        (None, 0.05, "did not finish the handshake in time"),
    ],
    ids=["http", "ssh", "closes", "silent"],
)
async def test_dial_says_what_a_server_of_another_kind_did(
    transport: TrioWebsocketTransport, answer: bytes | None, timeout: float, said: str
) -> None:
    async def serve(stream):
        await stream.receive_some()
        if answer is None:
            await trio.sleep_forever()
        await stream.send_all(answer)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, serve, 0)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(ChannelClosed, match=said) as caught:
                async with transport.dial(HOST, port, timeout=timeout):
                    pass
            nursery.cancel_scope.cancel()
    assert f"{HOST}:{port}" in caught.value.title
    assert caught.value.hint


async def test_dial_waits_no_longer_than_it_was_told_for_a_machine_that_is_silent(
    transport: TrioWebsocketTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(host, port):
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", never)
    with trio.fail_after(PATIENCE), pytest.raises(ChannelClosed, match="timed out"):
        async with transport.dial(HOST, 80, timeout=0.05):
            pass


async def test_listen_refuses_a_port_that_another_program_uses(transport: TrioWebsocketTransport) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    async with listener:
        port = listener.socket.getsockname()[1]
        with trio.fail_after(PATIENCE), pytest.raises(ConfigError, match=f"{HOST}:{port}.*in use.*another port"):
            await transport.listen(HOST, port, echo)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("a" * 80, 0), (HOST, 70_000), (HOST, -1)])
async def test_listen_refuses_an_address_that_cannot_be_had(
    transport: TrioWebsocketTransport, host: str, port: int
) -> None:
    with trio.fail_after(PATIENCE), pytest.raises(ConfigError, match=f"{host}:{port}"):
        await transport.listen(host, port, echo)


async def test_ipv6_addresses_are_spelt_with_brackets(transport: TrioWebsocketTransport) -> None:
    try:
        listeners = await trio.open_tcp_listeners(0, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    for listener in listeners:
        await listener.aclose()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(transport.listen, "::1", 0, echo)
            async with transport.dial("::1", port, timeout=PATIENCE) as channel:
                assert channel.peer == f"[::1]:{port}"
                assert channel.local_host == "::1"
                await channel.send(b"x")
                assert await channel.receive() == b"x"
            nursery.cancel_scope.cancel()


async def test_a_handlers_own_errors_are_logged_by_how_unexpected_they_are(
    transport: TrioWebsocketTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="core.tcp.transport")

    def levels(text: str) -> list[str]:
        return [record.levelname for record in caplog.records if text in caplog.handler.format(record)]

    async def bug(channel):
        raise ValueError("a bug")

    async def refusal(channel):
        async with trio.open_nursery():
            raise ChannelClosed("silent for too long")

    with trio.fail_after(PATIENCE):
        for handler in (bug, refusal):
            async with listening(transport, handler) as port, transport.dial(HOST, port, timeout=PATIENCE) as channel:
                with pytest.raises(ChannelClosed):
                    await channel.receive()
    assert levels("ValueError: a bug") == ["ERROR"]
    assert levels("silent for too long") == ["INFO"]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
async def test_what_is_sent_past_the_event_loop_arrives_whole_and_in_order(size: int) -> None:
    """From a client, which masks, and from a server, which doesn't."""
    transport, data = TrioWebsocketTransport(), random.Random(size).randbytes(size)

    async def answer(channel: Channel) -> None:
        assert await channel.receive() == data
        assert await trio.to_thread.run_sync(channel.send_now, data)
        await channel.send(b"and the usual way")

    with trio.fail_after(300):
        async with listening(transport, answer) as port, transport.dial(HOST, port, timeout=PATIENCE) as channel:
            assert await trio.to_thread.run_sync(channel.send_now, data)
            assert await channel.receive() == data
            assert await channel.receive() == b"and the usual way"


async def test_a_large_message_or_a_closed_connection_is_not_for_sending_past_the_event_loop() -> None:
    with trio.fail_after(300):
        async with (
            listening(TrioWebsocketTransport(), echo) as port,
            TrioWebsocketTransport().dial(HOST, port, timeout=PATIENCE) as channel,
        ):
            assert not channel.send_now(bytes(65_537))
            await channel.aclose()
            assert not channel.send_now(b"x")
