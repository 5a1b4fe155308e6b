"""A node with several hops at once, which share the layers that it holds and wait for each other in nothing else."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.lowlevel
from torch import Tensor

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.node.connection import MAX_HOPS
from core.node.stage_loader import StageLoader
from core.plugins import PluginHost
from core.protocol.fields import Holding, Segment, Span
from core.protocol.messages import (
    Assignment,
    ClearCache,
    ConnectPeer,
    CopyCache,
    Error,
    HiddenState,
    InferenceError,
    KeepLayers,
    LoadComplete,
    LoadFailed,
    NodeState,
    PeerConnected,
    Release,
    RunPrefill,
)
from core.protocol.tensors import from_wire, to_wire
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import TOKEN, PlayedCoordinator, lone_node, shard_of

SECONDS = 300
CPU = torch.device("cpu")
HIDDEN = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=4)


def batch(hop: int, session: int = 1, position: int = 0, hidden: Tensor = HIDDEN) -> RunPrefill:
    return RunPrefill(hop, [Segment(session, position, len(hidden), len(hidden))], to_wire(hidden, torch.float32))


def computed(model: Path, *ranges: range) -> Tensor:
    """What a stage of each of `ranges`, one after another, makes of `HIDDEN`."""
    plugins, hidden = PluginHost.installed(), HIDDEN
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(model)), plugins) as opened:
        for layers in ranges:
            stage, _ = opened.load_stage(layers, precision, CPU)
            hidden = stage.run(hidden, batch(1).segments, outputs_only=False)
    return hidden


def holding(model: Path, *layers: tuple[int, int]) -> Holding:
    return Holding(shard_of(model, range(1)).proof.manifest, "fp16", "fp32", [Span(*span) for span in layers])


async def run(coordinator: PlayedCoordinator, order: RunPrefill) -> tuple[int, Tensor]:
    await coordinator.send(order, "1f")
    answer = await coordinator.expect(HiddenState)
    return answer.hop, from_wire(answer.hidden)


async def test_hops_share_layers_and_end_one_by_one(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            assert coordinator.hello.speed > 0
            assert coordinator.hello.holdings == []
            first = await coordinator.assign(1, shard_of(model, range(3)))
            [state] = [each for each in coordinator.heard if isinstance(each, NodeState)]
            assert state.holdings == [holding(model, (0, 3))]
            second = await coordinator.assign(2, shard_of(model, range(1, 4)))
            assert second.read_bytes * 3 == first.read_bytes
            assert second.weight_bytes == first.weight_bytes
            assert node.activity.weight_bytes * 3 == first.weight_bytes * 4
            for hop, layers in ((1, range(3)), (2, range(1, 4))):
                answered, hidden = await run(coordinator, batch(hop))
                assert answered == hop
                torch.testing.assert_close(hidden, computed(model, layers))
            await coordinator.send(Release(1))
            await coordinator.send(batch(1))
            assert (await run(coordinator, batch(2, position=5)))[0] == 2
            assert (node.activity.state, node.activity.layers) == ("ready", range(1, 4))
            await coordinator.send(KeepLayers([]))
            while (state := await coordinator.expect(NodeState)).holdings != [holding(model, (1, 4))]:
                pass
            assert (await run(coordinator, batch(2, position=10)))[0] == 2
            state = await coordinator.let_go(2)
            assert (state.sessions, state.kv_bytes) == (0, 0)
            assert (node.activity.state, node.activity.layers, node.activity.weight_bytes) == ("spare", None, 0)


async def test_of_a_hop_that_ended_nothing_is_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[weakref.ref[Stage]] = []
    load_stage = Model.load_stage

    def noted(*args: Any) -> Any:
        stage, read = load_stage(*args)
        stages.append(weakref.ref(stage))
        return stage, read

    monkeypatch.setattr(Model, "load_stage", noted)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(4)))
            await run(coordinator, batch(1))
            await coordinator.let_go(1)
            gc.collect()
            assert [stage() for stage in stages] == [None]


async def test_a_coordinator_knows_the_node_that_it_started() -> None:
    with trio.fail_after(SECONDS):
        async with lone_node(local_token=TOKEN) as node:
            assert (await node.met()).hello.local_token == TOKEN


async def test_what_a_hop_hands_on_is_for_the_next(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)), next_hop=7)
            await coordinator.send(batch(1), "1f")
            passed = await coordinator.expect(RunPrefill)
            assert passed.hop == 7
            torch.testing.assert_close(from_wire(passed.hidden), computed(model, range(2)))
            await coordinator.send(CopyCache(1, source=1, target=2, length=3))
            assert await coordinator.expect(CopyCache) == CopyCache(7, source=1, target=2, length=3)
            await coordinator.send(ClearCache(1, [1, 2]))
            assert await coordinator.expect(ClearCache) == ClearCache(7, [1, 2])


async def test_two_hops_of_one_route_may_be_on_one_machine(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)), next_hop=2)
            await coordinator.assign(2, shard_of(model, range(2, 4)))
            hello = coordinator.hello
            await coordinator.send(ConnectPeer(2, 1, hello.peer_hosts, hello.peer_port, TOKEN))
            assert await coordinator.expect(PeerConnected) == PeerConnected(2, True, "")
            hop, hidden = await run(coordinator, batch(1))
            assert hop == 2
            torch.testing.assert_close(hidden, computed(model, range(2), range(2, 4)))


async def test_a_batch_that_fails_is_answered_and_the_next_one_computed(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(4, shard_of(model, range(4)))
            await coordinator.send(batch(4, hidden=torch.full((1, 64), torch.nan)), "1f")
            assert (await coordinator.expect(InferenceError)).hop == 4
            assert (await run(coordinator, batch(4)))[0] == 4


async def test_no_more_batches_wait_than_there_is_memory_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, run_stage = threading.Event(), threading.Event(), Stage.run

    def held_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        begun.set()
        assert go_on.wait(SECONDS)
        return run_stage(*args, **kwargs)

    monkeypatch.setattr("core.node.hop._INBOX_BYTES", 3 * HIDDEN.nbytes)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(4, shard_of(model, range(4)))
            for _ in range(4):
                await run(coordinator, batch(4))
            monkeypatch.setattr(Stage, "run", held_up)
            for number in range(4):
                await coordinator.send(batch(4), str(number))
            assert "bytes of batches are waiting" in (await coordinator.expect(Error)).message
            go_on.set()
            await node.met()


class HeldUp:
    """Loads stop when all is read, until they are to `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        load, load_stage = StageLoader.load, Model.load_stage

        def noted(loader: StageLoader, *args: Any) -> Any:
            try:
                return load(loader, *args)
            finally:
                self.ended.set()

        def held_up(*args: Any) -> Any:
            loaded = load_stage(*args)
            self.read.set()
            assert self.go_on.wait(SECONDS)
            return loaded

        monkeypatch.setattr(StageLoader, "load", noted)
        monkeypatch.setattr(Model, "load_stage", held_up)


async def wait_for(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, SECONDS, abandon_on_cancel=True)


async def test_a_hop_serves_while_another_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed(model, range(2))
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            held_up = HeldUp(monkeypatch)
            await coordinator.send(Assignment(2, None, shard_of(model, range(4)), "fp32", TOKEN))
            await wait_for(held_up.read)
            assert (node.activity.state, node.activity.layers) == ("loading", range(4))
            hop, hidden = await run(coordinator, batch(1))
            assert hop == 1
            torch.testing.assert_close(hidden, expected)
            held_up.go_on.set()
            assert (await coordinator.expect(LoadComplete)).hop == 2


async def test_a_hop_that_is_released_while_it_loads_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up = HeldUp(monkeypatch)
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.send(Assignment(1, None, shard_of(model, range(4)), "fp32", TOKEN))
            await wait_for(held_up.read)
            assert (await coordinator.let_go(1)).holdings == []
            held_up.go_on.set()
            await wait_for(held_up.ended)
            await coordinator.send(KeepLayers([holding(model, (0, 4))]))
            assert (await coordinator.expect(NodeState)).holdings == []
            assert not any(isinstance(each, LoadComplete | LoadFailed) for each in coordinator.heard)


async def test_a_number_is_given_once(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            for _ in range(2):
                await coordinator.send(Assignment(1, None, shard_of(model, range(1)), "fp32", TOKEN))
            assert "a second ASSIGNMENT came for the hop 1" in (await coordinator.expect(Error)).message


async def test_a_node_has_so_many_hops_and_no_more(model: Path) -> None:
    shard = shard_of(model, range(1))
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            for hop in range(MAX_HOPS):
                await coordinator.assign(hop, shard)
            await coordinator.send(Assignment(99, None, shard, "fp32", TOKEN))
            refused = await coordinator.expect(LoadFailed)
            assert (refused.hop, refused.reason) == (99, f"this node has {MAX_HOPS} hops already")
            await coordinator.send(Release(0))
            await coordinator.assign(100, shard)


async def test_a_load_that_fails_ends_its_hop_alone(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            await coordinator.assign(1, shard_of(model, range(2)))
            wrong = shard_of(model, range(2), architecture="other")
            await coordinator.send(Assignment(2, None, wrong, "fp32", TOKEN))
            assert (await coordinator.expect(LoadFailed)).hop == 2
            await coordinator.send(Assignment(3, None, shard_of(model, range(2)), "fp99", TOKEN))
            assert "fp99" in (await coordinator.expect(LoadFailed)).reason
            assert (await run(coordinator, batch(1)))[0] == 1
            assert node.activity.state == "ready"
