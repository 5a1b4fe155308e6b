"""Who is let in when: nobody is forgotten who waits, and what the nodes hold is what the budget counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import trio

from core.errors import StageError
from core.interfaces.engine import GenerationRequest
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import MemoryCluster, RunningText, memory_cluster

SECONDS = 300
STAGE_BYTES = 443_904
"""Of three of the tiny model's six layers."""
KV_BYTES = 768
"""Of one token in three layers."""


def greedy(prompt: tuple[int, ...], max_tokens: int | None) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=max_tokens, temperature=0)


async def two_nodes(cluster: MemoryCluster, kv_tokens: int) -> None:
    for node_id in ("a", "b"):
        await cluster.start_node(node_id, max_memory=STAGE_BYTES + kv_tokens * KV_BYTES)
    await cluster.ready()


async def begin(cluster: MemoryCluster, nursery: trio.Nursery, request: GenerationRequest) -> RunningText:
    running = RunningText()
    nursery.start_soon(running.run, cluster.coordinator, request)
    return running


async def test_the_first_goes_on_when_the_last_makes_room(model: Path, prompt: tuple[int, ...]) -> None:
    """Two that each grow to all the memory there is: one has to begin anew, and the other must hear of it."""
    other = tuple(token + 1 for token in prompt)
    options = {"min_nodes": 2, "max_context": 300, "answer_tokens": 100, "speculation": False}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, **options) as cluster:
            await two_nodes(cluster, 512)
            alone = [await cluster.text(each, 300 - len(each)) for each in (prompt, other)]
            async with trio.open_nursery() as nursery:
                first = await begin(cluster, nursery, greedy(prompt, None))
                await first.begun.wait()
                second = await begin(cluster, nursery, greedy(other, None))
            texts = [await each.result() for each in (first, second)]
            assert texts == alone


async def test_whoever_gives_up_waiting_lets_those_behind_it_in(
    model: Path, prompt: tuple[int, ...], inside: Any, gate: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2) as cluster:
            await two_nodes(cluster, 640)
            within = inside(cluster)
            gate.close_after(3)
            async with trio.open_nursery() as nursery:
                first = await begin(cluster, nursery, greedy(prompt, 200))
                await cluster.until(lambda _: len(within.running) == 1)
                async with trio.open_nursery() as impatient:
                    await begin(cluster, impatient, greedy(prompt, 400))
                    await cluster.until(lambda _: len(within.waiting) == 1)
                    second = await begin(cluster, nursery, greedy(prompt, 8))
                    await cluster.until(lambda _: len(within.waiting) == 2)
                    impatient.cancel_scope.cancel()
                await cluster.until(lambda _: len(within.running) == 2)
                gate.open()
            assert await first.result()
            assert await second.result()


async def test_the_nodes_free_memory_before_they_copy_into_it(
    model: Path, prompt: tuple[int, ...], stages: list[Stage]
) -> None:
    shared = tuple(range(100, 300))
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, speculation=False) as cluster:
            await two_nodes(cluster, 512)
            await cluster.text(prompt, 8)
            await cluster.text(shared, 8)
            cluster.machine.sent.clear()
            await cluster.text((*shared[:100], *prompt), 8)
            kinds = [envelope["type"] for envelope in map(msgpack.unpackb, cluster.machine.sent)]
            orders = [kind for kind in kinds if kind in ("CLEAR_CACHE", "COPY_CACHE")]
            assert orders == ["CLEAR_CACHE", "COPY_CACHE"]


async def test_a_chunk_that_fails_voids_those_behind_it(
    model: Path, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave a gap, which must not end the session, nor have it go on twice."""
    run, failed = Stage.run, list[int]()

    def faulty(stage: Stage, hidden: torch.Tensor, segments: Any, **kwargs: Any) -> torch.Tensor:
        if not failed and stage.layers.start == 3 and segments[0].session == 2 and segments[0].position >= 10:
            failed.append(segments[0].position)
            raise StageError("out of memory")
        return run(stage, hidden, segments, **kwargs)

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", max_chunk=10, speculation=False, prefix_cache=False) as cluster:
            await cluster.ready()
            long = tuple(range(40, 140))
            expected = await cluster.text(long, 20)
            monkeypatch.setattr(Stage, "run", faulty)
            assert await cluster.text(long, 20) == expected
            assert failed
