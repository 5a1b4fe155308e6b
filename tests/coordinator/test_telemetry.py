"""What the coordinator counts, and tells those who watch, of generations that run, fail and leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from core.coordinator.telemetry import Histogram
from core.errors import ConfigError
from core.interfaces.engine import GenerationRequest
from core.interfaces.telemetry import SessionStatus
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster

SECONDS = 300


def counted(cluster: MemoryCluster) -> dict[tuple[str, str], float]:
    """Each metric's value by its name and its label's value."""
    return {
        (metric.name, sample.labels[0][1] if sample.labels else ""): sample.value
        for metric in cluster.coordinator.metrics()
        for sample in metric.samples
    }


async def test_a_generation_is_told_from_its_coming_to_its_end(model: Path, prompt: tuple[int, ...]) -> None:
    told: list[SessionStatus] = []
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", max_chunk=8) as cluster:
            await cluster.ready()
            async with cluster.coordinator.watch() as events:
                await cluster.text(prompt, 12)
                while not told or told[-1].phase != "done":
                    told.append(await anext(events))
    phases = [each.phase for each in told]
    assert phases[0] == "waiting"
    assert list(dict.fromkeys(phases)) == ["waiting", "prefill", "decode", "done"]
    prefilled = [each.prefilled for each in told if each.phase == "prefill"]
    assert prefilled == sorted(prefilled)
    assert {8, 16} <= set(prefilled)
    assert (told[-1].tokens, told[-1].prompt_tokens) == (12, len(prompt))


async def test_a_failure_is_told_with_its_reason(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", recovery_time=0) as cluster:
            await cluster.ready()
            async with cluster.coordinator.watch() as events:
                async with cluster.generating(prompt, max_tokens=400) as session:
                    cluster.stop_node("b")
                    await session.ended.wait()
                while (status := await anext(events)).phase != "failed":
                    pass
            assert "node 'b' was lost" in status.detail
            assert counted(cluster)["core_requests_ended", "failed"] == 1


async def test_the_status_tells_what_happened_who_serves_what_and_how_much(
    model: Path, prompt: tuple[int, ...]
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            await cluster.text(prompt, 10)
            status, history = cluster.coordinator.status(), cluster.coordinator.history()
            answer = await cluster.coordinator.what_if(["b"], [])
            cluster.stop_node("b")
            gone = await cluster.until(lambda status: len(status.nodes) == 1)
            with pytest.raises(ConfigError, match="nobody can join"):
                await cluster.coordinator.membership.invite(3600, "")
    assert {node.tokens for node in status.nodes} == {len(prompt) + 9}
    assert [(hop.node_id, hop.layers) for hop in status.hops] == sorted(
        (node.node_id, node.layers) for node in status.nodes
    )
    assert all(hop.weight_bytes > 0 for hop in status.hops)
    texts = [event.text for event in status.events]
    assert {"a joined, with cpu", "b joined, with cpu"} <= set(texts)
    assert texts[-1] == "ready, on route 1"
    assert any(event.text.startswith("b left: ") for event in gone.events)
    assert sum(point.tokens for point in history.points) == 10
    assert history.points[-1].sessions <= 1
    assert answer.message


async def test_it_counts_tokens_caches_hops_and_how_generations_end(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            await cluster.text(prompt, 10)
            await cluster.text(prompt, 10)
            assert cluster.coordinator.status().kv.kept > 0
            async with cluster.coordinator.generate(GenerationRequest(prompt, max_tokens=400)) as generation:
                await anext(aiter(generation))
            found = counted(cluster)
            assert found["core_requests", ""] == 3
            assert found["core_requests_ended", "length"] == 2
            assert found["core_requests_ended", "cancelled"] == 1
            assert found["core_prompt_tokens", ""] == 3 * len(prompt)
            assert found["core_cached_prompt_tokens", ""] == 2 * (len(prompt) - 1)
            assert found["core_generated_tokens", ""] >= 21
            assert found["core_batches", ""] >= 21
            assert found["core_kv_tokens", ""] > 0
            for node in ("a", "b"):
                assert found["core_hop_compute_seconds", node] > 0
            status = cluster.coordinator.status()
            assert [hop.node_id for hop in status.hops] == ["a", "b"]
            assert all(hop.compute_ms > 0 for hop in status.hops)


async def test_a_watcher_that_does_not_read_costs_bounded_memory(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.coordinator.watch() as events:
                for _ in range(100):
                    await cluster.text(prompt[:3], 1)
                assert isinstance(events, trio.MemoryReceiveChannel)
                assert events.statistics().current_buffer_used == events.statistics().max_buffer_size


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.add(value)
    sample = histogram.sample()
    assert sample.value == 12
    assert [count for _, count in sample.buckets] == [2, 3, 4]
