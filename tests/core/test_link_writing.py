"""How a link writes: what waits, what gives way, and what is given up."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from core.errors import ChannelClosed
from core.interfaces.transport import Channel
from core.link import WRITE_SECONDS, open_link
from core.protocol.codec import CHUNK_BYTES, Decoder
from core.protocol.fields import Tensor
from core.protocol.messages import Error, HiddenState, PeerLost
from core.testing.contracts import HOST, listening
from core.testing.transport import MemoryTransport

FOREVER = 10_000.0
"""Seconds of the test's clock, which jumps."""


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport()


async def test_a_peer_that_takes_nothing_is_given_up(transport: MemoryTransport, autojump_clock: MockClock) -> None:
    async def read_nothing(channel: Channel) -> None:
        await trio.sleep_forever()

    async with listening(transport, read_nothing) as port, transport.dial(HOST, port, timeout=1) as channel:
        began = trio.current_time()
        with pytest.raises(ChannelClosed), trio.fail_after(FOREVER):
            async with open_link(channel) as link:
                while True:
                    await link.send(Error("end", ""))
        assert trio.current_time() - began == pytest.approx(WRITE_SECONDS)


class Quick(Channel):
    """A channel that can send past the event loop."""

    def __init__(self, inner: Channel) -> None:
        self.peer, self.local_host, self.inner = inner.peer, inner.local_host, inner
        self.sent_now: list[bytes] = []
        self.sent: list[bytes] = []
        self.blocked = trio.Event()

    def send_now(self, data: bytes) -> bool:
        self.sent_now.append(data)
        return True

    async def send(self, data: bytes) -> None:
        await self.blocked.wait()
        self.sent.append(data)

    async def receive(self) -> bytes:
        return await self.inner.receive()

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_a_message_past_the_event_loop_gives_way_to_what_is_written_and_queued(
    transport: MemoryTransport, autojump_clock: MockClock
) -> None:
    async def keep_receiving(channel: Channel) -> None:
        async with open_link(channel) as link:
            while True:
                await link.receive()

    async with listening(transport, keep_receiving) as port, transport.dial(HOST, port, timeout=1) as inner:
        channel = Quick(inner)
        async with open_link(channel, heartbeat=FOREVER) as link:
            await trio.testing.wait_all_tasks_blocked()
            assert not link.send_now(PeerLost(1, "")), "the first heartbeat is being written"
            await link.send(PeerLost(2, ""))
            channel.blocked.set()
            await trio.testing.wait_all_tasks_blocked()
            assert len(channel.sent) == 2
            assert await trio.to_thread.run_sync(link.send_now, PeerLost(3, ""))
            large = HiddenState(1, Tensor("fp32", 1, CHUNK_BYTES, bytes(4 * CHUNK_BYTES)), [])
            assert not link.send_now(large), "frames of one message follow each other"
        assert [Decoder().feed(data).message for data in channel.sent_now] == [PeerLost(3, "")]  # type: ignore[union-attr]
