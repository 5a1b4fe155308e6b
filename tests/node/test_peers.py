"""The port where a node waits for its neighbours: whoever lacks a hop's token is told no, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.errors import ChannelClosed
from core.link import HANDSHAKE_SECONDS, Link, first_message
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    ConnectPeer,
    Error,
    Hello,
    HelloAck,
    HiddenState,
    Message,
    PeerConnected,
    PeerHello,
    PeerLost,
    Release,
    RunDecode,
)
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import TOKEN, LoneNode, PlayedCoordinator, lone_node, shard_of

SECONDS = 300
NO_TOKEN = bytes(16)
ROW = Tensor("fp32", 1, 64, bytes(256))
RUN = RunDecode(5, [Segment(1, 0, 1, 1)], ROW)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture
def clock() -> MockClock:
    return MockClock(rate=1.0)


async def with_a_hop(node: LoneNode, model: Path) -> PlayedCoordinator:
    """The hop 5 of a route, which hands on to a hop 6."""
    coordinator = await node.met()
    await coordinator.assign(5, shard_of(model, range(1)), next_hop=6)
    return coordinator


async def welcomed(link: Link, hello: Message) -> None:
    await link.send(hello)
    assert isinstance(await first_message(link), HelloAck)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (PeerHello(PROTOCOL_VERSION, 5, NO_TOKEN), "wrong_token"),
        (PeerHello(PROTOCOL_VERSION, 0, TOKEN), "other_hop"),
        (PeerHello(PROTOCOL_VERSION, 6, TOKEN), "other_hop"),
        (PeerHello(PROTOCOL_VERSION + 1, 5, TOKEN), "protocol_version"),
        (Hello(PROTOCOL_VERSION, "x"), "not_a_peer"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.TYPE,
)
async def test_a_stranger_is_refused(model: Path, message: Message, code: str) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await with_a_hop(node, model)
            async with node.neighbour(coordinator) as link:
                await link.send(message)
                answer = await first_message(link)
                assert isinstance(answer, Error)
                assert answer.code == code
                with pytest.raises(ChannelClosed):
                    await link.receive()
            await coordinator.send(RUN)
            assert (await coordinator.expect(RunDecode)).hop == 6


async def test_a_stranger_that_talks_nonsense_is_told_so() -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node, node.neighbour(await node.met()) as link:
            await link._channel.send(b"\xc1 no message")
            answer = await first_message(link)
            assert isinstance(answer, Error)
            assert answer.code == "protocol"


async def test_a_stranger_that_says_nothing_is_cut_off(model: Path, clock: MockClock) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node, node.neighbour(await node.met()) as link:
            for _ in range(int(HANDSHAKE_SECONDS) + 1):
                clock.jump(1)
                await wait_all_tasks_blocked()
            with pytest.raises(ChannelClosed):
                await link.receive()


async def test_a_node_without_layers_has_no_neighbour() -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node, node.neighbour(await node.met()) as link:
            await link.send(PeerHello(PROTOCOL_VERSION, 0, NO_TOKEN))
            answer = await first_message(link)
            assert isinstance(answer, Error)
            assert answer.code == "other_hop"


async def test_a_neighbour_gets_what_was_handed_on(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await with_a_hop(node, model)
            async with node.neighbour(coordinator) as link:
                await welcomed(link, PeerHello(PROTOCOL_VERSION, 5, TOKEN))
                await coordinator.send(RUN, "1f")
                packet = await link.receive()
                assert isinstance(packet.message, RunDecode)
                assert (packet.message.hop, packet.request_id) == (6, "1f")
                await coordinator.send(Release(5))
                with pytest.raises(ChannelClosed):
                    await link.receive()


async def test_a_neighbour_that_breaks_the_protocol_costs_its_link_and_nothing_else(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await with_a_hop(node, model)
            await coordinator.assign(7, shard_of(model, range(2)))
            async with node.neighbour(coordinator) as link:
                await welcomed(link, PeerHello(PROTOCOL_VERSION, 5, TOKEN))
                await link.send(Error("end", "nonsense"))
                lost = await coordinator.expect(PeerLost)
                assert lost.hop == 5
                assert "the link to the downstream node: the downstream node sent a ERROR" in lost.reason
            await coordinator.send(RunDecode(7, RUN.segments, ROW))
            assert (await coordinator.expect(HiddenState)).hop == 7


async def test_an_upstream_node_that_does_not_answer_is_said(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await with_a_hop(node, model)
            await coordinator.send(ConnectPeer(5, 4, ["127.0.0.1"], 9, TOKEN))
            connected = await coordinator.expect(PeerConnected)
            assert (connected.hop, connected.direct) == (5, False)
            assert "nothing listens there" in connected.reason
