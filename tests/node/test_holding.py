"""What a node holds beyond its hops: to stand by, for a coordinator that comes back, and for how long."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.node.agent import HELD_SECONDS, SOON_SECONDS, SOON_WAIT_SECONDS
from core.protocol.fields import Holding, Segment, Span, Tensor
from core.protocol.messages import KeepLayers, Leave, LoadComplete, NodeState, Pause, Release, RunPrefill, StandBy
from core.runtime.model import Model
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import lone_node, shard_of

SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=4)


@pytest.fixture
def clock() -> MockClock:
    return MockClock(rate=1.0)


async def nobody(seconds: float, clock: MockClock) -> None:
    """Lets that much time pass in which no coordinator answers. The clock waits for what runs in threads."""
    threads = trio.to_thread.current_default_thread_limiter()
    for _ in range(int(seconds)):
        clock.jump(1)
        await wait_all_tasks_blocked()
        while threads.borrowed_tokens:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()


def holding(model: Path, *layers: tuple[int, int]) -> Holding:
    return Holding(shard_of(model, range(1)).proof.manifest, "fp16", "fp32", [Span(*span) for span in layers])


@pytest.mark.parametrize("in_memory", [True, False])
async def test_to_stand_by_is_to_load_without_a_hop(model: Path, in_memory: bool) -> None:
    shard = shard_of(model, range(2))
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.send(StandBy(9, shard, in_memory))
            ready = await coordinator.expect(LoadComplete)
            assert ready.hop == 9
            assert ready.weight_bytes == (shard.weight_bytes if in_memory else 0)
            assert (node.activity.state, node.activity.layers) == ("spare", None)
            loaded = await coordinator.assign(1, shard_of(model, range(2)))
            assert (loaded.read_bytes == 0) is in_memory


async def test_room_for_caches_is_told_with_the_layers_that_it_is_beside(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are let go of, and the room that they leave is not measured yet."""
    go_on = threading.Event()

    def held_up(*_: object) -> None:
        assert go_on.wait(SECONDS)

    monkeypatch.setattr("core.node.connection.give_back_memory", held_up)
    with trio.fail_after(SECONDS):
        async with lone_node(max_memory=2**24) as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            await coordinator.assign(2, shard_of(model, range(2, 4)))
            before = next(told for told in reversed(coordinator.heard) if isinstance(told, NodeState))
            await coordinator.send(Release(2))
            await coordinator.send(KeepLayers([holding(model, (0, 2))]))
            await coordinator.send(RunPrefill(1, [Segment(1, 0, 1, 1)], Tensor("fp32", 1, 64, bytes(256))))
            while not (meanwhile := await coordinator.expect(NodeState)).sessions:
                pass
            assert (meanwhile.holdings, meanwhile.kv_room) == (before.holdings, before.kv_room)
            go_on.set()
            while (after := await coordinator.expect(NodeState)).holdings == before.holdings:
                pass
            assert after.kv_room > before.kv_room


async def test_to_stand_by_is_not_what_a_node_that_serves_is_seen_to_do(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            seen: list[str] = []
            node.activity.on_change = lambda activity: seen.append(f"{activity.state} {activity.layers}")
            await coordinator.send(StandBy(9, shard_of(model, range(4)), True))
            await coordinator.expect(LoadComplete)
            assert set(seen) == {"ready range(0, 2)"}


async def test_a_stand_by_is_called_off_by_its_number(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, go_on = threading.Event(), threading.Event()
    load_layers = Model.load_layers

    def held_up(*args: Any) -> Any:
        read.set()
        assert go_on.wait(SECONDS)
        return load_layers(*args)

    monkeypatch.setattr(Model, "load_layers", held_up)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.send(StandBy(9, shard_of(model, range(2), parity_layer=None), True))
            assert await trio.to_thread.run_sync(read.wait, SECONDS)
            await coordinator.let_go(9)
            go_on.set()
            assert (await coordinator.assign(1, shard_of(model, range(2)))).read_bytes > 0


async def test_a_coordinator_that_starts_again_finds_the_layers(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(1, 3)))
            coordinator.leave()
            coordinator = await node.met()
            assert coordinator.hello.holdings == [holding(model, (1, 3))]
            assert (await coordinator.assign(1, shard_of(model, range(1, 3)))).read_bytes == 0


async def test_a_coordinator_that_was_there_is_looked_for_more_often(model: Path, clock: MockClock) -> None:
    with trio.fail_after(10 * SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            with node.away():
                coordinator.leave()
                await nobody(SOON_SECONDS, clock)
                soon = [after - before for before, after in pairwise(node.dialled)]
                assert max(soon) <= SOON_WAIT_SECONDS + 1
                del node.dialled[:-1]
                await nobody(SOON_SECONDS, clock)
                later = [after - before for before, after in pairwise(node.dialled)]
                assert max(later) > SOON_WAIT_SECONDS + 1


async def test_layers_are_let_go_of_when_no_coordinator_comes_for_long(model: Path, clock: MockClock) -> None:
    with trio.fail_after(SECONDS + 2 * HELD_SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            assert node.activity.weight_bytes > 0
            with node.away():
                coordinator.leave()
                await nobody(HELD_SECONDS - 5, clock)
                assert node.activity.weight_bytes > 0
                await nobody(10, clock)
                while node.activity.weight_bytes:
                    await trio.lowlevel.checkpoint()
            coordinator = await node.met()
            assert coordinator.hello.holdings == []


async def test_a_node_that_leaves_waits_until_it_serves_nobody(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            node.duty.leave("its user quit")
            assert await coordinator.expect(Pause) == Pause("its user quit", leaves=True)
            await coordinator.send(Release(1))
            await coordinator.send(KeepLayers([]))
            assert await coordinator.expect(Leave) == Leave("its user quit")
            await node.ended.wait()
