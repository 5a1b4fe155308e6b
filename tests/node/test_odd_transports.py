"""Transports that raise what no transport should: a node loses a connection by it, and comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from core.errors import ProtocolError
from core.node.hop import Hop
from core.protocol.messages import ConnectPeer, PeerConnected, PeerLost
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import TOKEN, lone_node, shard_of
from core.testing.transport import LOOPBACK, MemoryChannel, MemoryTransport

SECONDS = 300


class Odd:
    """In place of a method: raises `failure` while there are `times` left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, failure: Exception) -> None:
        self.times = 0
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.times > 0:
                self.times -= 1
                raise failure
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize("failure", [OSError("no route to host"), KeyError("peer"), AssertionError()], ids=repr)
@pytest.mark.parametrize("method", ["send", "receive"])
async def test_a_node_survives_what_a_channel_raises(
    monkeypatch: pytest.MonkeyPatch, method: str, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    odd = Odd(monkeypatch, MemoryChannel, method, failure)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            await node.met()
            odd.times = 1
            await node.met()
            assert not node.ended.is_set()


async def test_a_node_survives_what_dialling_raises_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = Odd(monkeypatch, MemoryTransport, "dial", OSError("no route to host"))
    odd.times = 3
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            await node.met()
    [told] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "OSError: no route to host; trying again" in told.getMessage()
    assert told.exc_info is not None


@pytest.mark.parametrize("failure", [ProtocolError("the peer broke the protocol"), KeyError("peer")], ids=repr)
async def test_what_a_neighbours_link_raises_as_it_closes_costs_that_link_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    leave = trio.Event()

    @asynccontextmanager
    async def failing(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(receive=leave.wait)
        raise failure

    async def ended(*_: Any) -> None:
        await leave.wait()

    monkeypatch.setattr("core.node.hop.dial_upstream", failing)
    monkeypatch.setattr(Hop, "_take_batches", ended)
    shard = shard_of(tiny_checkpoint(tmp_path, layers=2), range(1, 2))
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(2, shard)
            await coordinator.send(ConnectPeer(2, 1, [LOOPBACK], 9, TOKEN))
            assert (await coordinator.expect(PeerConnected)).direct
            leave.set()
            lost = await coordinator.expect(PeerLost)
            assert (lost.hop, type(failure).__name__ in lost.reason) == (2, True)
            await coordinator.assign(3, shard)


async def test_a_neighbour_that_dialling_fails_on_oddly_is_relayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Odd(monkeypatch, MemoryTransport, "dial", KeyError("peer"))
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(2, shard_of(tiny_checkpoint(tmp_path, layers=2), range(1, 2)))
            odd.times = 1
            await coordinator.send(ConnectPeer(2, 1, [LOOPBACK], 9, TOKEN))
            answer = await coordinator.expect(PeerConnected)
            assert (answer.direct, "KeyError: 'peer'" in answer.reason) == (False, True)
