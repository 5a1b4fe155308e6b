"""Bytes on the wire: after prefill one row per hop and step, whatever the context; in prefill each row once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch
import trio

from core import DType
from core.coordinator.session import READ_AHEAD
from core.interfaces.engine import GenerationRequest
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster

SECONDS = 300
WIDTH = 128
ENVELOPE = 200
"""What a message may take beside its tensor."""
NODES = ("a", "b", "c")
DATA = ("RUN_PREFILL", "RUN_DECODE", "HIDDEN_STATE", "CHUNK", "CLEAR_CACHE")


class Frame(NamedTuple):
    kind: str
    size: int
    payload: dict[str, Any]

    @property
    def rows(self) -> int:
        return int(self.payload["hidden"][1])

    @property
    def tensor_bytes(self) -> int:
        return len(self.payload["data"] if self.kind == "CHUNK" else self.payload["hidden"][3])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return tiny_checkpoint(path, layers=6, hidden_size=WIDTH, max_position_embeddings=2048, endless=True)


def prompt_of(length: int) -> tuple[int, ...]:
    ids: list[int] = torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return tuple(ids)


def machines_of(cluster: MemoryCluster) -> list[Machine]:
    """In the order of the route; the coordinator, where it begins, first."""
    return [cluster.machine, *cluster.machines.values()]


def data_frames(machine: Machine) -> list[Frame]:
    """What a machine sent that has to do with a generation, in order."""
    envelopes = [(frame, msgpack.unpackb(frame)) for frame in machine.sent]
    return [Frame(e["type"], len(frame), e["payload"]) for frame, e in envelopes if e["type"] in DATA]


async def generate(cluster: MemoryCluster, prompt: Sequence[int], max_tokens: int) -> tuple[int, list[list[Frame]]]:
    """Tokens generated, and what each machine sent meanwhile."""
    await cluster.until(lambda status: all(node.sessions == 0 for node in status.nodes))
    for machine in machines_of(cluster):
        machine.sent.clear()
    tokens = 0
    request = GenerationRequest(tuple(prompt), max_tokens=max_tokens, temperature=0)
    async with cluster.coordinator.generate(request) as generation:
        async for delta in generation:
            tokens = delta.tokens
        frames = [data_frames(machine) for machine in machines_of(cluster)]
    return tokens, frames


def of_kind(frames: list[Frame], *kinds: str) -> list[Frame]:
    return [frame for frame in frames if frame.kind in kinds]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP32])
async def test_a_decode_step_is_one_row_on_each_hop_at_any_context(model: Path, stages: int, dtype: DType) -> None:
    row, steps = WIDTH * dtype.itemsize, 5
    sizes: dict[int, list[list[int]]] = {}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *NODES[:stages], dtype=dtype, wire_dtype=dtype.value) as cluster:
            await cluster.ready()
            for context in (10, 400):
                tokens, (coordinator, *nodes) = await generate(cluster, prompt_of(context), max_tokens=steps + 1)
                assert tokens == steps + 1
                hops = [of_kind(frames, "RUN_DECODE") for frames in (coordinator, *nodes[:-1])]
                hops.append(of_kind(nodes[-1], "HIDDEN_STATE")[1:])
                for frames in hops:
                    assert len(frames) == steps
                    assert {(frame.rows, frame.tensor_bytes) for frame in frames} == {(1, row)}
                    assert max(frame.size for frame in frames) <= row + ENVELOPE
                sent = sum(len(of_kind(frames, "RUN_DECODE", "HIDDEN_STATE")) for frames in (coordinator, *nodes))
                assert sent == steps * (stages + 1) + 1, "N nodes cost N + 1 transfers, and the prefill one answer"
                sizes[context] = [[frame.size for frame in frames] for frames in hops]
    for short, long in zip(sizes[10], sizes[400], strict=True):
        assert sum(long) - sum(short) <= 16 * steps, "positions and times are longer numbers, no more"


@pytest.mark.parametrize("stages", [2, 3])
async def test_prefill_sends_each_row_once_and_only_the_last_comes_back(model: Path, stages: int) -> None:
    length, chunks = 1100, [512, 512, 76]
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *NODES[:stages]) as cluster:
            await cluster.ready()
            _, (coordinator, *nodes) = await generate(cluster, prompt_of(length), max_tokens=1)
    for frames in (coordinator, *nodes[:-1]):
        assert [frame.rows for frame in of_kind(frames, "RUN_PREFILL")] == chunks
        carried = of_kind(frames, "RUN_PREFILL", "CHUNK")
        assert sum(frame.tensor_bytes for frame in carried) == length * WIDTH * 4
        assert sum(frame.size for frame in carried) <= length * WIDTH * 4 + ENVELOPE * len(carried)
        assert of_kind(frames, "RUN_DECODE", "HIDDEN_STATE") == []
    answers = of_kind(nodes[-1], *DATA)
    assert [(frame.kind, frame.rows) for frame in answers] == [("HIDDEN_STATE", rows) for rows in (0, 0, 1)]
    assert sum(frame.size for frame in answers) <= WIDTH * 4 + ENVELOPE * len(answers)


async def test_no_weights_cross_the_links(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *NODES) as cluster:
            await cluster.ready()
            spent = [sum(map(len, machine.sent)) for machine in machines_of(cluster)]
    weights = (model / "model.safetensors").stat().st_size
    assert sum(spent) < 150_000 < weights / 2, "what a node proves itself with does not grow with the weights"


async def test_an_idle_cluster_sends_heartbeats_alone(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *NODES, prefix_cache=False) as cluster:
            await generate_and_settle(cluster)
            for machine in machines_of(cluster):
                machine.sent.clear()
            await cluster.until(lambda _: all(len(machine.sent) >= 2 for machine in machines_of(cluster)))
            kinds = {msgpack.unpackb(frame)["type"] for machine in machines_of(cluster) for frame in machine.sent}
    assert kinds <= {"PING", "PONG"}


async def generate_and_settle(cluster: MemoryCluster) -> None:
    await cluster.ready()
    # More tokens than a generation may be ahead of its reader: it runs for as long as nobody reads on.
    request = GenerationRequest(prompt_of(5), max_tokens=3 * READ_AHEAD, temperature=0, ignore_eos=True)
    async with cluster.coordinator.generate(request) as generation:
        async for _ in generation:
            await cluster.until(lambda status: all(node.sessions > 0 for node in status.nodes))
    await cluster.until(lambda status: all(node.sessions == 0 for node in status.nodes))
