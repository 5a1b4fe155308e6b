"""Nodes that die, hang or lose each other: texts go on, or whoever generates is told at once who it was."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from core.coordinator.route import VERDICT_SECONDS
from core.errors import NotReady, RouteError
from core.interfaces.transport import Channel
from core.link import HEARTBEAT_SECONDS, PATIENCE_SECONDS
from core.testing.cluster_in_memory import Machine, memory_cluster, pass_time
from core.testing.transport import MemoryTransport

SECONDS = 300
TOKENS = 24
LONG = 400
"""Tokens of a text that goes on for a while after its first token."""


def sent_by(machine: Machine, kind: str) -> list[dict[str, Any]]:
    """The payloads of all messages of a kind that a machine sent."""
    envelopes = [msgpack.unpackb(frame) for frame in machine.sent]
    return [envelope["payload"] for envelope in envelopes if envelope["type"] == kind]


LAYERS = {"a": "[0, 2)", "b": "[2, 4)", "c": "[4, 6)"}


@pytest.mark.parametrize("victim", LAYERS)
async def test_a_killed_node_is_named_with_its_layers_at_once(
    model: Path, prompt: tuple[int, ...], oracle: str, victim: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *LAYERS, recovery_time=0) as cluster:
            await cluster.ready()
            async with cluster.generating(prompt, LONG) as session:
                cluster.stop_node(victim)
                await session.ended.wait()
            assert isinstance(session.error, RouteError)
            assert (session.error.node, session.error.layers) == (victim, LAYERS[victim])
            assert f"node '{victim}' was lost with layers {LAYERS[victim]}" in str(session.error)
            assert "silent" not in str(session.error), "noticed by the closed connection"
            await cluster.until(lambda status: "must join" in status.detail)  # a plan may be in the making
            with pytest.raises(NotReady, match=rf"node '{victim}' was lost.*1 more node must join"):
                await cluster.text(prompt, 1)
            await cluster.start_node(victim)
            await cluster.ready(after_epoch=1)
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_a_spare_node_takes_the_place_of_a_dead_one(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            whole = await cluster.text(prompt, LONG)
            await cluster.start_node("c")
            assert [node.state for node in cluster.coordinator.status().nodes] == ["ready", "ready", "spare"]
            async with cluster.generating(prompt, LONG) as session:
                cluster.stop_node("a")
                assert await session.result() == whole
            status = cluster.coordinator.status()
            assert status.route_epoch == 2
            assert {node.node_id: node.layers for node in status.nodes} == {"b": (3, 6), "c": (0, 3)}


async def test_those_that_are_left_serve_if_they_can(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", min_nodes=1, rebalance=False) as cluster:
            await cluster.ready()
            whole = await cluster.text(prompt, LONG)
            await cluster.start_node("b")
            for dead, left in (("a", "b"), ("b", "a")):
                async with cluster.generating(prompt, LONG) as session:
                    cluster.stop_node(dead)
                    if left == "a":
                        await cluster.start_node("a")
                    assert await session.result() == whole
                status = cluster.coordinator.status()
                assert [(node.node_id, node.layers) for node in status.nodes] == [(left, (0, 6))]


async def test_a_node_whose_connections_break_comes_back_by_itself_with_its_weights(
    model: Path, prompt: tuple[int, ...]
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            [loaded] = sent_by(cluster.machines["b"], "LOAD_COMPLETE")
            assert loaded["read_bytes"] > 0
            whole = await cluster.text(prompt, LONG)
            async with cluster.generating(prompt, LONG) as session:
                cluster.machines["b"].sever()
                assert await session.result() == whole
            status = cluster.coordinator.status()
            assert status.route_epoch == 2
            assert len(status.nodes) == 2
            assert [done["read_bytes"] for done in sent_by(cluster.machines["b"], "LOAD_COMPLETE")][1:] == [0]


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_an_unplugged_node_is_noticed_by_its_silence(
    model: Path, prompt: tuple[int, ...], clock: MockClock, victim: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", recovery_time=0) as cluster:
            await cluster.ready()
            async with cluster.generating(prompt, LONG) as session:
                cluster.machines[victim].unplug()
                await pass_time(clock, PATIENCE_SECONDS + HEARTBEAT_SECONDS + VERDICT_SECONDS + 1)
                await session.ended.wait()
            assert isinstance(session.error, RouteError)
            assert session.error.node == victim
            assert "silent for 3 s" in str(session.error)
            status = cluster.coordinator.status()
            assert [node.node_id for node in status.nodes] == ["b" if victim == "a" else "a"]


async def test_a_lost_link_between_neighbours_makes_a_new_route_of_the_same_stages(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", recovery_time=0) as cluster:
            before = await cluster.ready()
            async with cluster.generating(prompt, LONG) as session:
                cluster.network.sever(cluster.machines["a"].port)
                await session.ended.wait()
            assert isinstance(session.error, RouteError)
            assert "to a neighbour was lost" in str(session.error)
            assert session.error.node in ("a", "b")
            after = await cluster.ready(after_epoch=before.route_epoch)
            assert [node.layers for node in after.nodes] == [node.layers for node in before.nodes]
            for machine in cluster.machines.values():
                assert [done["read_bytes"] > 0 for done in sent_by(machine, "LOAD_COMPLETE")] == [True, False]
            status = await cluster.until(lambda status: all(node.sessions == 0 for node in status.nodes))
            assert [node.kv_tokens for node in status.nodes] == [0, 0], "a kept stage begins with empty caches"
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_a_node_that_dies_while_it_loads_is_waited_for_no_longer(
    model: Path, clock: MockClock, gate: Any
) -> None:
    gate.close_after(0)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.until(lambda _: gate.arrived == 1)
            cluster.stop_node("b")
            await cluster.until(lambda status: "node 'b' was lost" in status.detail)
            gate.open()
            await cluster.start_node("c")
            await pass_time(clock, 6)
            status = await cluster.ready()
            assert [node.node_id for node in status.nodes] == ["a", "c"]


async def test_a_node_looks_for_its_coordinator_until_it_is_there(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            cluster.machine.sever()
            await cluster.ready(after_epoch=1)
            assert await cluster.text(prompt, 1)


class OneWay(Machine):
    """A machine that reaches the coordinator, and none of `others`."""

    def __init__(self, network: MemoryTransport, others: Iterable[Machine]) -> None:
        super().__init__(network)
        self._others = list(others)

    def dial(self, host: str, port: int, **options: Any) -> AbstractAsyncContextManager[Channel]:
        nowhere = any(port == machine.port for machine in self._others)
        return super().dial("10.9.9.9" if nowhere else host, port, **options)


@pytest.mark.parametrize("relayed", [1, 2], ids=["one link", "both links"])
async def test_neighbours_that_do_not_reach_each_other_are_relayed(
    model: Path, prompt: tuple[int, ...], oracle: str, relayed: int
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3, prefix_cache=False) as cluster:
            for index, node_id in enumerate("abc"):
                one_way = OneWay(cluster.network, cluster.machines.values())
                await cluster.start_node(node_id, machine=one_way if index >= 3 - relayed else None)
            status = await cluster.ready()
            links = [node.link for node in status.nodes]
            assert links[0] == ""
            assert [link.startswith("relayed by the coordinator") for link in links] == [
                index >= 3 - relayed for index in range(3)
            ]
            assert "refused" in links[2], "and it says why"
            assert await cluster.text(prompt, TOKENS) == oracle
            await cluster.until(lambda status: all(node.sessions == 0 for node in status.nodes))


async def test_what_a_broken_route_left_in_the_caches_is_freed_at_once(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", min_nodes=2) as cluster:
            await cluster.ready()
            async with cluster.generating(prompt, LONG) as session:
                await cluster.until(lambda status: all(node.kv_tokens > 0 for node in status.nodes))
                cluster.stop_node("b")
                status = await cluster.until(lambda status: all(node.kv_tokens == 0 for node in status.nodes))
                assert [(node.node_id, node.sessions) for node in status.nodes] == [("a", 0)]
                assert "1 more node must join" in status.detail
                assert [generation.phase for generation in status.generations] == ["suspended"]
                assert not session.ended.is_set()
