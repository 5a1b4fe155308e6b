"""The port where a node waits for its neighbour: whoever lacks the route's token is told no, and changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from core.errors import ChannelClosed
from core.link import HANDSHAKE_SECONDS, Link, first_message, open_link
from core.protocol.messages import PROTOCOL_VERSION, Error, Hello, HelloAck, Message, PeerHello
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster, pass_time
from core.testing.transport import LOOPBACK

SECONDS = 60
PROMPT = (5, 6, 7)
NO_TOKEN = bytes(16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2, endless=True)


@pytest.fixture
def clock() -> MockClock:
    return MockClock(rate=1.0)


@asynccontextmanager
async def peer_port(cluster: MemoryCluster) -> AsyncIterator[Link]:
    """A link to the port where node a hands its rows on."""
    port = cluster.machines["a"].port
    async with cluster.network.dial(LOOPBACK, port, timeout=1) as channel, open_link(channel) as link:
        yield link


def route_token(cluster: MemoryCluster) -> bytes:
    """The token that node b was given for its link to node a."""
    envelopes: list[dict[str, Any]] = [msgpack.unpackb(frame) for frame in cluster.machine.sent]
    [order] = [envelope["payload"] for envelope in envelopes if envelope["type"] == "CONNECT_PEER"]
    token: bytes = order["link_token"]
    return token


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (PeerHello(PROTOCOL_VERSION, 1, NO_TOKEN), "wrong_token"),
        (PeerHello(PROTOCOL_VERSION, 0, NO_TOKEN), "other_epoch"),
        (PeerHello(PROTOCOL_VERSION, 2, NO_TOKEN), "other_epoch"),
        (PeerHello(PROTOCOL_VERSION + 1, 1, NO_TOKEN), "protocol_version"),
        (Hello(PROTOCOL_VERSION, "x"), "not_a_peer"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.TYPE,
)
async def test_a_stranger_is_refused(model: Path, message: Message, code: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            before = await cluster.text(PROMPT, 8)
            async with peer_port(cluster) as link:
                await link.send(message)
                answer = await first_message(link)
                assert isinstance(answer, Error)
                assert answer.code == code
                with pytest.raises(ChannelClosed):
                    await link.receive()
            assert await cluster.text(PROMPT, 8) == before
            assert cluster.coordinator.status().route_epoch == 1


async def test_a_stranger_that_talks_nonsense_is_told_so(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2) as cluster:
            await cluster.start_node("a")
            async with peer_port(cluster) as link:
                await link._channel.send(b"\xc1 no message")
                answer = await first_message(link)
                assert isinstance(answer, Error)
                assert answer.code == "protocol"


async def test_a_stranger_that_says_nothing_is_cut_off(model: Path, clock: MockClock) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            async with peer_port(cluster) as link:
                await pass_time(clock, HANDSHAKE_SECONDS + 1)
                with pytest.raises(ChannelClosed):
                    await link.receive()
            assert await cluster.text(PROMPT, 8)


async def test_a_node_without_layers_has_no_neighbour(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2) as cluster:
            await cluster.start_node("a")
            async with peer_port(cluster) as link:
                await link.send(PeerHello(PROTOCOL_VERSION, 0, NO_TOKEN))
                answer = await first_message(link)
                assert isinstance(answer, Error)
                assert answer.code == "other_epoch"


async def test_a_neighbour_that_breaks_the_protocol_costs_the_route_and_nothing_else(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            before = await cluster.text(PROMPT, 8)
            async with peer_port(cluster) as link:
                await link.send(PeerHello(PROTOCOL_VERSION, 1, route_token(cluster)))
                assert isinstance(await first_message(link), HelloAck)
                await link.send(Error("end", "nonsense"))
                await cluster.ready(after_epoch=1)
            assert await cluster.text(PROMPT, 8) == before
            assert len(cluster.coordinator.status().nodes) == 2
