"""A node counts for itself: whoever fills its caches gets no more of them than it told, or than its user allows."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
import trio

from core.interfaces.transport import Channel
from core.link import Link, first_message, open_link
from core.protocol.fields import Segment
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    ConnectPeer,
    CopyCache,
    HelloAck,
    HiddenState,
    InferenceError,
    LoadFailed,
    Message,
    NodeState,
    PeerConnected,
    PeerHello,
    RunPrefill,
)
from core.protocol.tensors import to_wire
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import TOKEN, PlayedCoordinator, lone_node, shard_of
from core.testing.transport import LOOPBACK

SECONDS = 60
ROWS = 256
CACHES = 2**20
"""Bytes that the user allows beside the layers."""
Send = Callable[[Message, str], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


def batch(hop: int, session: int, position: int = 0) -> RunPrefill:
    return RunPrefill(hop, [Segment(session, position, ROWS, 1)], to_wire(torch.ones(ROWS, 64), torch.float32))


async def said(coordinator: PlayedCoordinator) -> HiddenState | InferenceError:
    while not isinstance(message := await coordinator.expect(Message), HiddenState | InferenceError):
        pass
    return message


async def refusal(coordinator: PlayedCoordinator, send: Send, hop: int) -> str:
    """Why one more session is refused, once there is no room for it."""
    for session in itertools.count(1):
        await send(batch(hop, session), "1f")
        if isinstance(answer := await said(coordinator), InferenceError):
            return answer.message
    raise AssertionError


def most_held(coordinator: PlayedCoordinator) -> int:
    """Bytes of caches, in any state that was told."""
    return max(told.kv_bytes for told in coordinator.heard if isinstance(told, NodeState))


async def test_what_goes_beyond_the_users_bound_is_refused(model: Path) -> None:
    shard = shard_of(model, range(1))
    with trio.fail_after(SECONDS):
        async with lone_node(max_memory=shard.weight_bytes + CACHES) as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard)
            assert "no room for more KV cache" in await refusal(coordinator, coordinator.send, 1)
            await coordinator.send(CopyCache(1, source=1, target=99, length=ROWS))
            assert "no room" in (await coordinator.expect(InferenceError)).message
            while not (state := await coordinator.expect(NodeState)).sessions:
                pass
            assert state.kv_bytes <= CACHES + state.kv_bytes // state.sessions
            await coordinator.send(Assignment(2, None, shard_of(model, range(2)), "fp32", TOKEN))
            assert "do not fit beside" in (await coordinator.expect(LoadFailed)).reason
            await coordinator.send(batch(1, session=1), "1f")
            assert isinstance(await said(coordinator), HiddenState)


async def test_the_sessions_of_one_hop_are_nothing_to_another(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            for hop in (1, 2):
                await coordinator.assign(hop, shard_of(model, range(1)))
            await coordinator.send(batch(1, session=7), "1f")
            assert isinstance(await said(coordinator), HiddenState)
            for order in (batch(2, session=7, position=ROWS), CopyCache(2, source=7, target=8, length=1)):
                await coordinator.send(order, "1f")
                refused = await coordinator.expect(InferenceError)
                assert "session 7 has 0 tokens cached" in refused.message


async def test_a_neighbour_fills_no_more_than_was_told(model: Path) -> None:
    shard = shard_of(model, range(1))
    put, links = trio.open_memory_channel[Link](1)

    async def welcome(channel: Channel) -> None:
        async with open_link(channel) as link:
            assert isinstance(await first_message(link), PeerHello)
            await link.send(HelloAck(PROTOCOL_VERSION))
            await put.send(link)
            await trio.sleep_forever()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery, lone_node(max_memory=shard.weight_bytes + CACHES) as node:
            port = await nursery.start(node.network.listen, LOOPBACK, 0, welcome)
            coordinator = await node.met()
            await coordinator.assign(2, shard)
            await coordinator.send(ConnectPeer(2, 1, [LOOPBACK], port, TOKEN))
            assert (await coordinator.expect(PeerConnected)).direct
            neighbour = await links.receive()
            assert "no room" in await refusal(coordinator, neighbour.send, 2)
            await coordinator.send(CopyCache(2, source=1, target=99, length=ROWS))
            await coordinator.expect(InferenceError)
            assert most_held(coordinator) <= CACHES + CACHES // 2
            nursery.cancel_scope.cancel()
