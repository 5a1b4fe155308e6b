"""A node tells how long its layers take: found once they are loaded, and then by what serving shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from core.node import connection, hop_times
from core.protocol.fields import LayerTime, Segment
from core.protocol.messages import HiddenState, KeepLayers, NodeState, RunDecode, RunPrefill
from core.protocol.tensors import to_wire
from core.runtime import kept_file
from core.runtime.speed import WeightSpeed
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import PlayedCoordinator, lone_node, shard_of

SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


async def told(coordinator: PlayedCoordinator, other_than: list[LayerTime]) -> LayerTime:
    """The only kind of layer, when it is told another time for it."""
    while (times := (await coordinator.expect(NodeState)).layer_times) == other_than:
        pass
    [time] = times
    return time


async def run(coordinator: PlayedCoordinator, start: int, rows: int, session: int = 1) -> None:
    hidden = to_wire(torch.randn(rows, 64), torch.float32)
    kind = RunDecode if rows == 1 else RunPrefill
    await coordinator.send(kind(1, [Segment(session, start, rows, 1)], hidden), "1f")
    await coordinator.expect(HiddenState)


async def test_layers_are_timed_when_they_are_loaded_and_told_in_a_later_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_file, "user_cache_path", lambda name: tmp_path)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            assert coordinator.hello.chunk_speed > 0
            assert coordinator.hello.layer_times == []
            await coordinator.assign(1, shard_of(model, range(2)))
            found = await told(coordinator, [])
            assert found.row_ns > 0
            assert found.chunk_ns > 0
        async with lone_node() as node:
            assert [time.kind for time in (await node.met()).hello.layer_times] == [found.kind]


async def test_serving_shows_what_layers_take(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        return None

    monkeypatch.setattr(hop_times.HopTimes, "find", never)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            await run(coordinator, 0, hop_times.MIN_CHUNK_ROWS)
            chunk = await told(coordinator, [])
            assert (chunk.row_ns, chunk.chunk_ns > 0) == (0, True)
            for position in range(8):
                await run(coordinator, hop_times.MIN_CHUNK_ROWS + position, 1)
            row = await told(coordinator, [chunk])
            assert row.row_ns > 0
            assert (row.kind, row.chunk_ns) == (chunk.kind, chunk.chunk_ns)


@pytest.mark.parametrize("as_fast", [True, False])
async def test_a_machine_that_serves_nobody_is_slow_for_as_long_as_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, as_fast: bool
) -> None:
    looked = 0

    def speed_now(device: torch.device) -> WeightSpeed:
        nonlocal looked
        looked += 1
        return WeightSpeed(2**62 if as_fast else 1, 1)

    monkeypatch.setattr(connection, "speed_now", speed_now)
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.01)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            idle = await told(coordinator, [])
            for position in range(20):
                await run(coordinator, position, 1)
            served = await told(coordinator, [idle])
            await coordinator.let_go(1)
            before = looked
            while looked < before + 3:
                await coordinator.send(KeepLayers([]))
                state = await coordinator.expect(NodeState)
            assert state.layer_times == ([idle] if as_fast else [served])


async def test_far_into_a_text_a_row_says_little_of_the_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        return None

    monkeypatch.setattr(hop_times.HopTimes, "find", never)
    monkeypatch.setattr(hop_times, "NEAR", 4)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            for position in range(40):
                await run(coordinator, position, 1)
            await coordinator.let_go(1)
            states = [message for message in coordinator.heard if isinstance(message, NodeState)]
            assert all(state.layer_times == [] for state in states)
