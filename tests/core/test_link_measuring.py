"""A link finds out what a message takes, and how many bytes the network takes in a second."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from core.interfaces.transport import Channel
from core.link import HEARTBEAT_SECONDS, PROBE_BYTES, PROBES, Link, open_link
from core.protocol.codec import Decoder, Packet, encode_whole
from core.protocol.messages import Ping, Pong
from core.testing.contracts import HOST, listening
from core.testing.transport import MemoryTransport


@pytest.mark.parametrize(("settled", "bandwidth"), [(True, 1e6), (True, 1e12), (False, 1e6)])
async def test_a_link_tells_its_round_trip_and_what_it_takes(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    settled: bool,
    bandwidth: int,
) -> None:
    """Only whoever is dialled, and knows the peer, asks it to send so much; what is too fast to tell is not told."""
    monkeypatch.setattr("core.link._now_us", lambda: round(trio.current_time() * 1e6))
    transport, links, probes = MemoryTransport(), list[Link](), 0

    async def accept(channel: Channel) -> None:
        async with open_link(channel) as link:
            links.append(link)
            if settled:
                link.settle()
            while True:
                await link.receive()

    async with listening(transport, accept) as port, transport.dial(HOST, port, timeout=1) as channel:
        with trio.move_on_after(10 * HEARTBEAT_SECONDS):
            while True:
                packet = Decoder().feed(await channel.receive())
                assert packet is not None
                message = packet.message
                assert isinstance(message, Ping)
                probes += len(message.padding) == PROBE_BYTES
                await trio.sleep(0.02 + 2 * len(message.padding) / bandwidth)
                await channel.send(encode_whole(Packet(Pong(message.sent_us, message.padding))))
        [link] = links
        assert link.round_trip == link.typical_round_trip == pytest.approx(0.02)
        assert link.measured.is_set() is settled
        assert probes == (PROBES if settled else 0)
        assert link.bandwidth == pytest.approx(1e6 if settled and bandwidth == 1e6 else 0.0, rel=0.01)
