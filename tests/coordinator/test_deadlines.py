"""Generations whose time is up: in every phase they end then, and nothing of them is left on any node."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from core.errors import DeadlineExceeded
from core.interfaces.engine import GenerationRequest
from core.runtime.stage import Stage
from core.runtime.tokenizer import Tokenizer
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster, pass_time

SECONDS = 300
MAX_TIME = 30.0


@asynccontextmanager
async def ready_cluster(model: Path, **settings: Any) -> AsyncIterator[MemoryCluster]:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", "c", prefix_cache=False, **settings) as cluster:
            await cluster.ready()
            yield cluster


def bounded(prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=400, temperature=0, deadline=trio.current_time() + MAX_TIME)


class Bounded:
    """Reads a generation until its time is up; one that `reads` nothing waits instead."""

    def __init__(self, cluster: MemoryCluster, request: GenerationRequest, *, reads: bool = True) -> None:
        self.tokens = 0
        self._cluster = cluster
        self._request = request
        self._reads = reads

    async def run(self, complaint: str) -> None:
        with pytest.raises(DeadlineExceeded, match=complaint):
            async with self._cluster.coordinator.generate(self._request) as generation:
                if not self._reads:
                    await trio.sleep_forever()
                async for delta in generation:
                    self.tokens = delta.tokens
        assert trio.current_time() >= self._request.deadline


async def nothing_is_left(cluster: MemoryCluster, stages: list[Stage], deadlines: int = 1) -> None:
    assert cluster.coordinator.status().sessions == 0
    await cluster.until(lambda status: status.kv.reserved == 0)
    await cluster.until(lambda _: not any(len(stage.caches) for stage in stages))
    await cluster.until(lambda status: all((node.sessions, node.kv_tokens) == (0, 0) for node in status.nodes))
    ended = next(metric for metric in cluster.coordinator.metrics() if metric.name == "core_requests_ended")
    assert {sample.labels[0][1]: sample.value for sample in ended.samples}["deadline"] == deadlines


async def test_while_it_waits_for_room(
    model: Path, prompt: tuple[int, ...], inside: Any, clock: MockClock, stages: list[Stage]
) -> None:
    async with ready_cluster(model, max_sessions=1) as cluster:
        within = inside(cluster)
        running = GenerationRequest(prompt, max_tokens=400, temperature=0)
        async with cluster.coordinator.generate(running), trio.open_nursery() as nursery:
            await cluster.until(lambda _: all(session.is_ahead for session in within.running.values()))
            nursery.start_soon(Bounded(cluster, bounded(prompt)).run, "waiting for room beside 1 running and 0 waiting")
            await cluster.until(lambda _: len(within.waiting) == 1)
            await pass_time(clock, MAX_TIME)
        assert within.waiting == []
        await nothing_is_left(cluster, stages)


@pytest.mark.parametrize(
    ("batches", "complaint"),
    [(1, r"\d+ of its prompt's 20 tokens were prefilled .*shorten the prompt"), (5, r"\d tokens were decoded")],
    ids=["in prefill", "in a decode step"],
)
async def test_while_a_stage_computes(
    model: Path,
    prompt: tuple[int, ...],
    batches: int,
    complaint: str,
    gate: Any,
    inside: Any,
    clock: MockClock,
    stages: list[Stage],
) -> None:
    """It ends at once, and what it holds is freed when the batch that is under way has passed."""
    async with ready_cluster(model, speculation=False, max_chunk=7) as cluster:
        gate.close_after(3 * batches)
        late = Bounded(cluster, bounded(prompt))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.run, complaint)
            await cluster.until(lambda _: gate.waiting)
            await pass_time(clock, MAX_TIME)
        assert inside(cluster).route.in_flight >= 1
        assert (late.tokens > 0) == (batches == 5)
        gate.open()
        await nothing_is_left(cluster, stages)
        assert inside(cluster).route.in_flight == 0


async def test_while_its_reader_does_not_read(
    model: Path, prompt: tuple[int, ...], inside: Any, clock: MockClock, stages: list[Stage]
) -> None:
    async with ready_cluster(model) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(Bounded(cluster, bounded(prompt), reads=False).run, "tokens were decoded")
        within = inside(cluster)
        await cluster.until(lambda _: any(session.is_ahead for session in within.running.values()))
        await pass_time(clock, MAX_TIME)
        await nothing_is_left(cluster, stages)


async def test_while_its_prompt_becomes_tokens(model: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode(*_: Any) -> list[int]:
        begun.set()
        assert go_on.wait(SECONDS)
        return [7]

    async with ready_cluster(model) as cluster:
        monkeypatch.setattr(Tokenizer, "encode", encode)
        request = GenerationRequest("hello", deadline=trio.current_time() + MAX_TIME)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Bounded(cluster, request).run, "turned into tokens")
            await cluster.until(lambda _: begun.is_set())
            await pass_time(clock, MAX_TIME)
        go_on.set()
        assert cluster.coordinator.status().sessions == 0


async def test_a_time_that_is_up_before_anything_runs(
    model: Path, prompt: tuple[int, ...], clock: MockClock, stages: list[Stage]
) -> None:
    async with ready_cluster(model) as cluster:
        request = bounded(prompt)
        await pass_time(clock, MAX_TIME)
        await Bounded(cluster, request).run("turned into tokens")
        await nothing_is_left(cluster, stages)


async def test_what_was_prefilled_is_kept_for_a_second_try(
    model: Path, prompt: tuple[int, ...], clock: MockClock, gate: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", max_chunk=18) as cluster, trio.open_nursery() as nursery:
            await cluster.ready()
            gate.close_after(1)
            nursery.start_soon(Bounded(cluster, bounded(prompt)).run, "18 of its prompt's 20 tokens were prefilled")
            await cluster.until(lambda _: gate.waiting)
            await pass_time(clock, MAX_TIME)
            gate.open()
            await cluster.until(lambda status: status.kv.kept > 0)
            async with cluster.coordinator.generate(GenerationRequest(prompt, max_tokens=2)) as generation:
                await anext(aiter(generation))
                assert generation.cached_tokens >= 18
