"""A cluster whose machines say how long their layers take: what it tells of that, and what it makes of it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from core.coordinator.drift import CHECK_SECONDS, HOLD_SECONDS
from core.coordinator.improvement import REBALANCE_SECONDS
from core.coordinator.token_times import MIN_STEPS
from core.interfaces.engine import ClusterStatus, NodeStatus
from core.interfaces.telemetry import Pace, PaceStatus, SessionStatus
from core.node import connection, report
from core.node.state import Node
from core.protocol.fields import LayerTime
from core.protocol.messages import NodeState
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster, pass_time

T = TypeVar("T")
SECONDS = 300
LAYERS = 6
MS = 10**6


class Told:
    """What nodes say that one row takes in each layer, by id, in nanoseconds."""

    def __init__(self) -> None:
        self.by_id: dict[str, int] = {}
        self._kinds: list[bytes] = []

    def of(self, node: Node) -> list[LayerTime]:
        ns = self.by_id.get(node.node_id)
        self._kinds += node.times.by_kind
        return [LayerTime(kind, ns, ns) for kind in self._kinds[:1]] if ns is not None else []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(report, "layer_times", told.of)
    monkeypatch.setattr(connection, "layer_times", told.of)
    return told


def node_of(status: ClusterStatus, node_id: str) -> NodeStatus:
    [found] = [node for node in status.nodes if node.node_id == node_id]
    return found


async def collect(events: AsyncIterator[T], told: list[T]) -> None:
    async for event in events:
        told.append(event)


async def say(cluster: MemoryCluster, node_id: str, seconds: float) -> None:
    """A generation, after which the coordinator has heard that a row takes so long in one layer of a node."""
    await cluster.text((3, 4, 5), 2)
    await cluster.until(lambda status: node_of(status, node_id).row_seconds[:1] == (pytest.approx(seconds),))


async def test_what_a_token_takes_is_predicted_and_measured(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            assert cluster.coordinator.status().measured_token_seconds == 0.0
            await cluster.text(prompt, 2 * MIN_STEPS)
            status = await cluster.until(lambda status: status.measured_token_seconds > 0)
            assert status.predicted_token_seconds > 0
            for node in status.nodes:
                assert len(node.row_seconds) == len(node.chunk_seconds) == LAYERS
                assert all(seconds > 0 for seconds in (*node.row_seconds, *node.chunk_seconds))
            metrics = {metric.name: metric.samples[0].value for metric in cluster.coordinator.metrics()}
            assert metrics["core_token_seconds"] == status.measured_token_seconds
            assert metrics["core_predicted_token_seconds"] > 0


async def test_links_are_measured_and_told(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            status = await cluster.until(lambda status: len(status.wires) == 3)
            assert {wire.ends for wire in status.wires} == {("", "a"), ("", "b"), ("a", "b")}


async def test_a_stage_that_stays_slow_is_shown_once_and_as_long_as_it_is(
    model: Path, told: Told, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "core.coordinator.drift")
    with trio.fail_after(SECONDS + 10 * HOLD_SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            told.by_id["a"] = 10 * MS
            await pass_time(clock, 2)
            await say(cluster, "a", 0.01)
            await pass_time(clock, HOLD_SECONDS)
            told.by_id["a"] = 14 * MS
            await say(cluster, "a", 0.014)
            events: list[SessionStatus | PaceStatus] = []
            async with cluster.coordinator.watch() as watched, trio.open_nursery() as nursery:
                nursery.start_soon(collect, watched, events)
                await pass_time(clock, HOLD_SECONDS / 2)
                assert node_of(cluster.coordinator.status(), "a").detail == ""
                await pass_time(clock, HOLD_SECONDS)
                nursery.cancel_scope.cancel()
            assert events == [PaceStatus("a", Pace.SLOWER, pytest.approx(0.084), pytest.approx(0.06))]
            assert "40% slower than planned" in node_of(cluster.coordinator.status(), "a").detail
            await pass_time(clock, HOLD_SECONDS)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "a token takes 84 ms there, 60 were planned" in caplog.text
            told.by_id["a"] = 10 * MS
            await say(cluster, "a", 0.01)
            await pass_time(clock, 1.5 * HOLD_SECONDS)
            assert node_of(cluster.coordinator.status(), "a").detail == ""


async def test_layers_move_from_a_machine_that_has_become_slow(model: Path, told: Told, clock: MockClock) -> None:
    """The spare is as fast as the other was, so no plan is better before. Afterwards nothing moves back and forth."""
    with trio.fail_after(SECONDS + 60 * HOLD_SECONDS):
        async with memory_cluster(model, "a", min_nodes=1, rebalance=True) as cluster:
            await cluster.ready()
            told.by_id = {"a": 10 * MS, "b": 10 * MS}
            await pass_time(clock, 2)
            await say(cluster, "a", 0.01)
            await cluster.start_node("b", max_memory=2**27)
            await pass_time(clock, 2 * REBALANCE_SECONDS)
            assert cluster.coordinator.status().route_epoch == 1
            told.by_id["a"] = 20 * MS
            await say(cluster, "a", 0.02)
            await pass_time(clock, HOLD_SECONDS + 2 * CHECK_SECONDS)
            status = await cluster.ready(after_epoch=1)
            assert node_of(status, "b").layers == (0, LAYERS)
            for ns in (11 * MS, 14 * MS, 9 * MS) * 3:
                told.by_id["b"] = ns
                await say(cluster, "b", ns / 1e9)
                await pass_time(clock, 0.9 * HOLD_SECONDS)
            assert cluster.coordinator.status().route_epoch == 2


async def test_a_number_that_is_none_ends_the_link_alone(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("liar") as liar:
                await liar.send(NodeState(0, 0, 0, 0, layer_times=[LayerTime(bytes(16), -1, 0)]))
                await cluster.until(lambda status: len(status.nodes) == 1)
            assert await cluster.text(prompt, 24) == oracle
