"""The contract of transports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio.testing

from core.errors import ChannelClosed, ConfigError, TrustError
from core.interfaces.transport import Channel, Handler, Transport
from core.trust.identity import Identity

HOST = "127.0.0.1"
PATIENCE = 120.0
"""Seconds that a test may take before it counts as hung."""


@asynccontextmanager
async def listening(transport: Transport, handler: Handler) -> AsyncIterator[int]:
    """Serves `handler` on the loopback interface, for peers that have proven who they are; gives the port."""

    async def settled(channel: Channel) -> None:
        channel.settled()
        await handler(channel)

    async with trio.open_nursery() as nursery:
        yield await nursery.start(transport.listen, HOST, 0, settled)
        nursery.cancel_scope.cancel()


async def echo(channel: Channel) -> None:
    """Sends back what it receives until the channel is closed."""
    while True:
        await channel.send(await channel.receive())


@pytest.mark.trio
class TransportContract:
    """The contract of `core.Transport`. A subclass named Test... has a fixture `transport` that gives one.

    Needs pytest and pytest-trio.
    """

    @pytest.fixture
    def transport(self) -> Transport:
        raise NotImplementedError("give a fixture `transport`")

    def dial(self, transport: Transport, port: int) -> AbstractAsyncContextManager[Channel]:
        return transport.dial(HOST, port, timeout=PATIENCE / 2)

    async def test_messages_come_back_as_they_were_sent(self, transport: Transport) -> None:
        sizes = [0, 1, 125, 126, 127, 4099, 65_535, 65_536, 131_071, transport.max_message - 1, transport.max_message]
        with trio.fail_after(PATIENCE):
            async with listening(transport, echo) as port, self.dial(transport, port) as channel:
                for size in sizes:
                    message = (bytes(range(251)) * (size // 251 + 1))[:size]
                    await channel.send(message)
                    assert await channel.receive() == message

    async def test_a_pin_leads_to_the_machine_with_that_certificate_alone(self, transport: Transport) -> None:
        """And on the same port, those who dial without a pin are served without encryption."""
        identity, served = Identity.fresh(), []

        async def tell(channel: Channel) -> None:
            served.append(channel.secure)
            await echo(channel)

        listen = partial(transport.listen, credentials=identity.credentials())
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                port = await nursery.start(listen, HOST, 0, tell)
                for pin in (identity.fingerprint, None):
                    async with transport.dial(HOST, port, timeout=PATIENCE / 2, pin=pin) as channel:
                        await channel.send(b"hello")
                        assert await channel.receive() == b"hello"
                        assert channel.secure is (pin is not None)
                with pytest.raises(TrustError):
                    async with transport.dial(HOST, port, timeout=PATIENCE / 2, pin=bytes(32)):
                        pytest.fail("it is connected to a machine that has another certificate")
                nursery.cancel_scope.cancel()
        assert served[:2] == [True, False]

    async def test_messages_keep_their_order(self, transport: Transport) -> None:
        messages = [str(number).encode() for number in range(500)]
        received = []

        async def drain(channel: Channel) -> None:
            for _ in messages:
                received.append(await channel.receive())

        with trio.fail_after(PATIENCE):
            async with (
                listening(transport, echo) as port,
                self.dial(transport, port) as channel,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(drain, channel)
                for message in messages:
                    await channel.send(message)
        assert received == messages

    async def test_much_in_both_directions_at_once_does_not_deadlock(self, transport: Transport) -> None:
        messages = [bytes([number]) * (transport.max_message // 4) for number in range(64)]
        received: dict[str, list[bytes]] = {"client": [], "server": []}
        done = trio.Event()

        async def exchange(channel: Channel, name: str) -> None:
            async def send() -> None:
                for message in messages:
                    await channel.send(message)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                for _ in messages:
                    received[name].append(await channel.receive())

        async def serve(channel: Channel) -> None:
            await exchange(channel, "server")
            done.set()

        with trio.fail_after(PATIENCE):
            async with listening(transport, serve) as port, self.dial(transport, port) as channel:
                await exchange(channel, "client")
                await done.wait()
        assert received["client"] == messages
        assert received["server"] == messages

    async def test_a_message_that_is_too_large_cuts_its_sender_off_and_no_other(self, transport: Transport) -> None:
        with trio.fail_after(PATIENCE):
            async with listening(transport, echo) as port, self.dial(transport, port) as other:
                async with self.dial(transport, port) as channel:
                    with suppress(ChannelClosed):
                        await channel.send(bytes(transport.max_message + 1))
                    await assert_closed(channel)
                await other.send(b"still here")
                assert await other.receive() == b"still here"

    async def test_the_peer_receives_what_was_sent_and_then_learns_of_the_close(self, transport: Transport) -> None:
        received: list[bytes] = []
        learnt = trio.Event()

        async def serve(channel: Channel) -> None:
            received.append(await channel.receive())
            await assert_closed(channel)
            learnt.set()

        with trio.fail_after(PATIENCE):
            async with listening(transport, serve) as port:
                async with self.dial(transport, port) as channel:
                    await channel.send(b"last")
                await learnt.wait()
        assert received == [b"last"]

    async def test_a_handler_that_returns_closes_the_connection(self, transport: Transport) -> None:
        async def serve(channel: Channel) -> None:
            await channel.send(b"goodbye")

        with trio.fail_after(PATIENCE):
            async with listening(transport, serve) as port, self.dial(transport, port) as channel:
                assert await channel.receive() == b"goodbye"
                await assert_closed(channel)

    async def test_closing_wakes_who_receives_and_may_be_repeated(self, transport: Transport) -> None:
        with trio.fail_after(PATIENCE):
            async with listening(transport, echo) as port, self.dial(transport, port) as channel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(assert_closed, channel)
                    await trio.testing.wait_all_tasks_blocked()
                    await channel.aclose()
                await channel.aclose()
                await assert_closed(channel)

    async def test_closing_does_not_wait_for_a_peer_that_reads_nothing(self, transport: Transport) -> None:
        async def idle(channel: Channel) -> None:
            await trio.sleep_forever()

        async def fill(channel: Channel) -> None:
            with suppress(ChannelClosed):
                while True:
                    await channel.send(bytes(transport.max_message))

        with trio.fail_after(PATIENCE):
            async with (
                listening(transport, idle) as port,
                self.dial(transport, port) as channel,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(fill, channel)
                await trio.testing.wait_all_tasks_blocked(cushion=0.05)
                await channel.aclose()

    async def test_a_close_that_is_cancelled_wakes_who_receives(self, transport: Transport) -> None:
        async def idle(channel: Channel) -> None:
            await trio.sleep_forever()

        with trio.fail_after(PATIENCE):
            async with (
                listening(transport, idle) as port,
                self.dial(transport, port) as channel,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(assert_closed, channel)
                await trio.testing.wait_all_tasks_blocked()
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await channel.aclose()

    async def test_the_body_of_a_dial_raises_as_it_is(self, transport: Transport) -> None:
        with trio.fail_after(PATIENCE):
            async with listening(transport, echo) as port:
                with pytest.raises(ZeroDivisionError):
                    async with self.dial(transport, port):
                        raise ZeroDivisionError

    async def test_a_channel_names_both_addresses(self, transport: Transport) -> None:
        async def tell(channel: Channel) -> None:
            await channel.send(f"{channel.peer} {channel.local_host}".encode())

        with trio.fail_after(PATIENCE):
            async with listening(transport, tell) as port, self.dial(transport, port) as channel:
                assert channel.peer == f"{HOST}:{port}"
                assert channel.local_host == HOST
                peer, local_host = (await channel.receive()).decode().split()
                assert peer.rpartition(":")[0] == HOST
                assert peer.rpartition(":")[2].isdigit()
                assert local_host == HOST

    async def test_dialling_where_nobody_listens_fails_with_a_reason(self, transport: Transport) -> None:
        async with listening(transport, echo) as port:
            pass
        with trio.fail_after(PATIENCE), pytest.raises(ChannelClosed) as caught:
            async with self.dial(transport, port):
                pass
        assert caught.value.reason

    async def test_cancelling_listen_closes_its_connections(self, transport: Transport) -> None:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                served = trio.CancelScope()

                async def serve(task_status: trio.TaskStatus[int]) -> None:
                    with served:
                        await transport.listen(HOST, 0, echo, task_status=task_status)

                port = await nursery.start(serve)
                async with self.dial(transport, port) as channel:
                    await channel.send(b"first")
                    assert await channel.receive() == b"first"
                    served.cancel()
                    await assert_closed(channel)

    @pytest.mark.parametrize("failure", [ValueError("a bug"), ChannelClosed("the peer went away")])
    async def test_a_handler_that_raises_harms_no_other_connection(
        self, transport: Transport, failure: Exception
    ) -> None:
        async def serve(channel: Channel) -> None:
            while (message := await channel.receive()) != b"fail":
                await channel.send(message)
            raise failure

        with trio.fail_after(PATIENCE):
            async with listening(transport, serve) as port, self.dial(transport, port) as before:
                async with self.dial(transport, port) as channel:
                    await channel.send(b"fail")
                    await assert_closed(channel)
                async with self.dial(transport, port) as after:
                    for other in (before, after):
                        await other.send(b"still here")
                        assert await other.receive() == b"still here"

    async def test_listening_on_a_port_in_use_is_refused(self, transport: Transport) -> None:
        with trio.fail_after(PATIENCE):
            async with listening(transport, echo) as port:
                with pytest.raises(ConfigError) as caught:
                    await transport.listen(HOST, port, echo)
        assert f"{HOST}:{port}" in str(caught.value)
        assert "port" in caught.value.hint


async def assert_closed(channel: Channel) -> None:
    """The connection has ended, or ends now: both directions say so."""
    with pytest.raises(ChannelClosed) as caught:
        while True:
            await channel.receive()
    assert caught.value.title
    with pytest.raises(ChannelClosed):
        await channel.send(b"into the void")
