"""A process that stood still for a while does not take that for its peer's silence."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.errors import ChannelClosed
from core.interfaces.transport import Channel
from core.link import PATIENCE_SECONDS, Link, open_link
from core.protocol.messages import Error
from core.testing.contracts import HOST, listening
from core.testing.transport import MemoryTransport


class Ended:
    """Why a link ended that was read from all the time; "" while it lives."""

    def __init__(self) -> None:
        self.because = ""

    async def read(self, link: Link) -> None:
        try:
            while True:
                await link.receive()
        except ChannelClosed as error:
            self.because = error.reason


async def told_of(stalls_too: bool, clock: MockClock) -> str:
    """What a link ended with after its process, or its laptop, was asleep; if its peer `stalls_too`, so was that, and
    did not wake."""
    transport, ended = MemoryTransport(), Ended()

    async def live(channel: Channel) -> None:
        async with open_link(channel) as link:
            await Ended().read(link)

    async with (
        listening(transport, live) as port,
        transport.dial(HOST, port, timeout=1) as channel,
        open_link(channel) as link,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ended.read, link)
        await wait_all_tasks_blocked()
        if stalls_too:
            transport.stall(port)
        for seconds in (3 * PATIENCE_SECONDS, 1.1, 1.1):
            clock.jump(seconds)
            await wait_all_tasks_blocked()
        link.try_send(Error("end", "are you there?"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return ended.because


async def test_what_came_meanwhile_is_read_first(mock_clock: MockClock) -> None:
    assert await told_of(False, mock_clock) == ""


async def test_a_peer_that_does_not_wake_is_noticed_soon(mock_clock: MockClock) -> None:
    assert "has been silent for 3 s" in await told_of(True, mock_clock)
