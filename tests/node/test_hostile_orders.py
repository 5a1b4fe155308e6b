"""Whatever a coordinator orders, well-formed and far from sensible: the node stays, and serves the next one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import trio

from core.errors import ChannelClosed
from core.protocol.fields import Holding, Segment, Shard, Span, Tensor
from core.protocol.messages import (
    Assignment,
    ClearCache,
    ConnectPeer,
    CopyCache,
    HiddenState,
    InferenceError,
    KeepLayers,
    Message,
    Ping,
    Release,
    RunDecode,
    RunPrefill,
    StandBy,
)
from core.protocol.tensors import to_wire
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import TOKEN, PlayedCoordinator, lone_node, shard_of

SECONDS = 120
ORDERS = 60
NUMBERS = [0, 1, 2, 3, 7, 2**31, 2**62]
Make = Callable[[random.Random, Shard], Message]


def segments(rng: random.Random) -> list[Segment]:
    rows = [rng.choice([1, 1, 2, 300, 2**20]) for _ in range(rng.randint(1, 3))]
    return [Segment(rng.choice(NUMBERS), rng.choice(NUMBERS), each, rng.randint(0, each)) for each in rows]


def tensor(rng: random.Random) -> Tensor:
    dtype, rows = rng.choice(["fp32", "fp16", "bf16", "fp8"]), rng.choice([0, 1, 2, 3])
    width = rng.choice([0, 1, 63, 64])
    return Tensor(dtype, rows, width, bytes(rows * width * {"fp32": 4, "fp8": 0}.get(dtype, 2)))


MAKERS: list[Make] = [
    lambda rng, _: RunPrefill(rng.choice(NUMBERS), segments(rng), tensor(rng)),
    lambda rng, _: RunDecode(1, segments(rng), tensor(rng), [2**62] * rng.choice([0, 1024])),
    lambda rng, _: RunPrefill(1, [Segment(rng.choice(NUMBERS), 0, 1, 1)], Tensor("fp32", 1, 64, b"\xff" * 256)),
    lambda rng, _: CopyCache(1, rng.choice(NUMBERS), rng.choice(NUMBERS), rng.choice(NUMBERS)),
    lambda rng, _: ClearCache(rng.choice(NUMBERS), [rng.choice(NUMBERS)]),
    lambda rng, _: ConnectPeer(1, rng.choice(NUMBERS), ["", "127.0.0.1", "x" * 256], rng.choice([0, 9]), TOKEN),
    lambda rng, _: KeepLayers([Holding(b"", "fp16", "fp32", [Span(0, rng.choice([0, 100_000]))])]),
    lambda rng, shard: Assignment(rng.choice(NUMBERS), rng.choice([None, 1]), shard, rng.choice(["fp32", ""]), TOKEN),
    lambda rng, shard: StandBy(rng.choice(NUMBERS), shard, rng.random() < 0.5),
    lambda rng, _: Release(rng.choice([2, 3, 7])),
    lambda rng, _: Ping(rng.choice(NUMBERS), bytes(rng.choice([0, 65_536]))),
    lambda rng, _: HiddenState(1, tensor(rng)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


async def drain(coordinator: PlayedCoordinator) -> None:
    with suppress(ChannelClosed):
        while True:
            await coordinator.expect(Message)


@pytest.mark.parametrize("seed", range(2))
async def test_a_node_outlives_whatever_it_is_ordered(model: Path, seed: int) -> None:
    rng, shard = random.Random(seed), shard_of(model, range(2))
    with trio.fail_after(SECONDS):
        async with lone_node(max_memory=2**26) as node:
            coordinator, made = await node.met(), 0
            while made < ORDERS:
                await coordinator.assign(1, shard)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(drain, coordinator)
                    with suppress(ChannelClosed):
                        while made < ORDERS:
                            made += 1
                            await coordinator.send(rng.choice(MAKERS)(rng, shard), "1f")
                            await trio.testing.wait_all_tasks_blocked()
                    nursery.cancel_scope.cancel()
                coordinator.leave()
                coordinator = await node.met()
            await coordinator.assign(1, shard)
            await coordinator.send(
                RunPrefill(1, [Segment(1, 0, 1, 1)], to_wire(torch.ones(1, 64), torch.float32)), "1f"
            )
            while not isinstance(answer := await coordinator.expect(Message), HiddenState | InferenceError):
                pass
            assert isinstance(answer, HiddenState)
            assert not node.ended.is_set()
