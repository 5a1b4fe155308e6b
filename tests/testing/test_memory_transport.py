"""The in-process transport keeps the contract, and its faults are those of real networks."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from core.errors import ChannelClosed
from core.testing.contracts import HOST, TransportContract, echo, listening
from core.testing.transport import MemoryTransport


class TestMemoryTransport(TransportContract):
    @pytest.fixture
    def transport(self) -> MemoryTransport:
        return MemoryTransport()


async def test_sever_ends_the_connections_of_one_port_at_both_ends() -> None:
    transport = MemoryTransport()
    learnt = trio.Event()

    async def serve(channel):
        with pytest.raises(ChannelClosed, match="broke off"):
            await channel.receive()
        learnt.set()

    with trio.fail_after(300):
        async with (
            listening(transport, serve) as port,
            listening(transport, echo) as other_port,
            transport.dial(HOST, port, timeout=1) as cut,
            transport.dial(HOST, other_port, timeout=1) as other,
        ):
            await trio.testing.wait_all_tasks_blocked()
            transport.sever(port)
            with pytest.raises(ChannelClosed, match="broke off"):
                await cut.receive()
            with pytest.raises(ChannelClosed):
                await cut.send(b"x")
            await learnt.wait()
            await other.send(b"still here")
            assert await other.receive() == b"still here"


async def test_a_stalled_connection_swallows_messages_and_tells_nobody(autojump_clock) -> None:
    transport = MemoryTransport()
    served = []

    async def serve(channel):
        served.append(channel)
        await echo(channel)

    async with listening(transport, serve) as port, transport.dial(HOST, port, timeout=1) as channel:
        await channel.send(b"before")
        assert await channel.receive() == b"before"
        transport.stall(port)
        await channel.send(b"lost")
        with trio.move_on_after(60) as waited:
            await channel.receive()
        assert waited.cancelled_caught
        await served[0].aclose()
        with trio.move_on_after(60) as waited:
            await channel.receive()
        assert waited.cancelled_caught


async def test_one_connection_of_a_port_can_stall_alone(autojump_clock) -> None:
    transport = MemoryTransport()
    async with (
        listening(transport, echo) as port,
        transport.dial(HOST, port, timeout=1) as stalled,
        transport.dial(HOST, port, timeout=1) as other,
    ):
        stalled.stall()
        await stalled.send(b"lost")
        with trio.move_on_after(60) as waited:
            await stalled.receive()
        assert waited.cancelled_caught
        await other.send(b"still here")
        assert await other.receive() == b"still here"


async def test_dialling_a_stalled_port_times_out(autojump_clock) -> None:
    transport = MemoryTransport()
    async with listening(transport, echo) as port:
        transport.stall(port)
        started = trio.current_time()
        with pytest.raises(ChannelClosed, match="timed out"):
            async with transport.dial(HOST, port, timeout=3):
                pass
        assert trio.current_time() - started == pytest.approx(3)


async def test_a_sender_waits_while_its_peer_reads_nothing(autojump_clock) -> None:
    transport = MemoryTransport()

    async def idle(channel):
        await trio.sleep_forever()

    async with listening(transport, idle) as port, transport.dial(HOST, port, timeout=1) as channel:
        with trio.move_on_after(60) as waited:
            for _ in range(1000):
                await channel.send(b"x")
        assert waited.cancelled_caught


@pytest.mark.parametrize(("bound", "dialled", "reached"), [("10.0.0.1", "10.0.0.2", False), ("0.0.0.0", "b", True)])
async def test_a_listener_is_reached_by_its_own_host_or_by_all(bound: str, dialled: str, reached: bool) -> None:
    transport = MemoryTransport()
    async with trio.open_nursery() as nursery:
        port = await nursery.start(transport.listen, bound, 0, echo)
        connected = False
        try:
            async with transport.dial(dialled, port, timeout=1):
                connected = True
        except ChannelClosed as error:
            assert "refused" in error.message
        assert connected == reached
        nursery.cancel_scope.cancel()


async def test_ports_are_allotted_or_taken_as_asked() -> None:
    transport = MemoryTransport()
    async with trio.open_nursery() as nursery:
        first = await nursery.start(transport.listen, HOST, 0, echo)
        second = await nursery.start(transport.listen, HOST, 0, echo)
        assert first != second
        assert await nursery.start(transport.listen, HOST, 7000, echo) == 7000
        nursery.cancel_scope.cancel()
