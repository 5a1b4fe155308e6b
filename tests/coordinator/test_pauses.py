"""Nodes that pause, resume and leave, and a host that ends: each says so, and nobody is cut off in mid-answer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from core.coordinator.pauses import DRAIN_SECONDS
from core.coordinator.readiness import State
from core.coordinator.supervisor import Supervisor
from core.errors import ChannelClosed, NotReady, RouteError
from core.interfaces.engine import GenerationRequest
from core.node.state import Duty
from core.protocol.messages import Assignment, Leave, Pause, Release
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time

SECONDS = 300
TOKENS = 24


def states(cluster: MemoryCluster) -> dict[str, str]:
    return {node.node_id: node.state for node in cluster.coordinator.status().nodes}


def layers_of(cluster: MemoryCluster) -> dict[str, tuple[int, int] | None]:
    return {node.node_id: node.layers for node in cluster.coordinator.status().nodes}


async def test_layers_of_a_node_that_pauses_go_to_another(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", max_nodes=1) as cluster:
            await cluster.ready()
            await cluster.start_node("b")
            cluster.duties["a"].pause("this machine runs on battery")
            await cluster.until(lambda _: states(cluster) == {"a": "paused", "b": "ready"})
            assert layers_of(cluster) == {"a": None, "b": (0, 6)}
            assert cluster.coordinator.status().left_out["a"] == "it is paused: this machine runs on battery"
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_a_node_that_pauses_lets_go_of_what_it_holds(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            cluster.duties["a"].pause("its user wants the machine")
            status = await cluster.until(lambda status: status.nodes[0].state == "paused")
            assert (status.nodes[0].weight_bytes, status.nodes[0].layers) == (0, None)
            cluster.duties["a"].resume()
            await cluster.ready(after_epoch=1)
            messages = map(msgpack.unpackb, cluster.machines["a"].sent)
            loads = [message["payload"] for message in messages if message["type"] == "LOAD_COMPLETE"]
            assert [load["read_bytes"] > 0 for load in loads] == [True, True]


async def test_without_the_node_that_pauses_the_cluster_says_what_it_waits_for(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            cluster.duties["b"].pause("a game")
            status = await cluster.until(lambda status: "must join" in status.detail)
            assert status.state == "waiting"
            assert "node 'b' is paused: a game" in status.detail
            assert status.ready_nodes == 1
            with pytest.raises(NotReady, match="'b' is paused: a game"):
                await cluster.text(prompt, 1)
            cluster.duties["b"].resume()
            await cluster.ready(after_epoch=1)
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_where_nothing_runs_a_node_that_leaves_is_told_of_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    become = Supervisor._become

    def become_and_tell(supervisor: Supervisor, state: State, said: str) -> None:
        become(supervisor, state, said)
        told.append(supervisor.detail)

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            monkeypatch.setattr(Supervisor, "_become", become_and_tell)
            cluster.duties["a"].leave("bye")
            await cluster.until(lambda status: "must join" in status.detail)
    assert told[0] == "node 'a' left: bye"
    assert all(detail.count("'a'") == 1 for detail in told)


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_runs_is_finished_before_a_node_pauses_or_leaves_that_nobody_can_stand_in_for(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any, leaves: bool
) -> None:
    parts = "leaves" if leaves else "pauses"
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            gate.close_after(3)
            async with cluster.generating(prompt, TOKENS) as running:
                duty = cluster.duties["a"]
                (duty.leave if leaves else duty.pause)("a game")
                status = await cluster.until(lambda status: status.state == "waiting")
                assert status.detail == f"node 'a' {parts}, what runs is finished first: a game"
                with pytest.raises(NotReady, match="a game"):
                    await cluster.text(prompt, 1)
                gate.open()
                assert await running.result() == oracle
            await cluster.until(lambda status: [node.state for node in status.nodes] == ["paused"] * (not leaves))


async def test_a_pause_that_is_taken_back_in_time_changes_nothing(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            gate.close_after(3)
            async with cluster.generating(prompt, TOKENS) as running:
                cluster.duties["a"].pause("a game")
                await cluster.until(lambda status: "a game" in status.detail)
                cluster.duties["a"].resume()
                await cluster.ready()
                gate.open()
                assert await running.result() == oracle
            status = cluster.coordinator.status()
            assert (status.route_epoch, status.nodes[0].state) == (1, "ready")


@pytest.mark.parametrize("recovery_time", [0, 120])
async def test_a_node_that_pauses_does_not_wait_for_ever(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any, clock: MockClock, recovery_time: float
) -> None:
    """What still runs on it then ends, or waits for layers to be there again."""
    with trio.fail_after(SECONDS + DRAIN_SECONDS):
        async with memory_cluster(model, "a", recovery_time=recovery_time) as cluster:
            await cluster.ready()
            gate.close_after(3)
            async with cluster.generating(prompt, TOKENS) as running:
                cluster.duties["a"].pause("a game")
                await cluster.until(lambda status: "a game" in status.detail)
                await pass_time(clock, DRAIN_SECONDS)
                if not recovery_time:
                    with pytest.raises(RouteError, match="node 'a' is paused: a game"):
                        await running.result()
                gate.open()
                await cluster.until(lambda status: status.nodes[0].state == "paused")
                if recovery_time:
                    cluster.duties["a"].resume()
                    assert await running.result() == oracle


async def test_a_node_that_pauses_while_it_loads_is_planned_around(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster, cluster.join("slow", free_memory=2**26) as slow:
            await cluster.until(lambda status: status.state == "loading")
            await slow.send(Pause("a game"))
            with trio.fail_after(DRAIN_SECONDS / 2):  # there is nothing to be finished first
                while not isinstance((await slow.receive()).message, Release):
                    pass
            await cluster.start_node("quick")
            await cluster.ready(after_epoch=1)
            assert layers_of(cluster) == {"slow": None, "quick": (0, 6)}
            await slow.send(Pause(""))
            await cluster.until(lambda status: status.nodes[0].state == "spare")


async def test_a_node_may_join_paused(model: Path) -> None:
    duty = Duty()
    duty.pause("outside its hours")
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            await cluster.start_node("a", duty=duty)
            await cluster.until(lambda status: "node 'a' is paused: outside its hours" in status.detail)
            duty.resume()
            await cluster.ready()


async def test_what_runs_on_a_node_that_leaves_moves_to_another(
    model: Path, prompt: tuple[int, ...], stages: list[Stage]
) -> None:
    """Its reader has not caught up: so it is in the middle of its text when the next route is there."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", max_nodes=1) as cluster:
            await cluster.ready()
            whole = await cluster.text(prompt, 120)
            await cluster.start_node("b")
            request = GenerationRequest(prompt, max_tokens=120, temperature=0)
            async with cluster.coordinator.generate(request) as generation:
                deltas = aiter(generation)
                text = (await anext(deltas)).text
                cluster.duties["a"].leave("its user quit")
                await cluster.until(lambda status: [node.node_id for node in status.nodes] == ["b"])
                text += "".join([delta.text async for delta in deltas])
            assert text == whole
            assert len(stages[0].caches) == 0


@pytest.mark.parametrize(
    ("leaves", "told", "waited_for"),
    [
        (True, "node 'b' left: its user quit", "1 more node must join"),
        (False, "node 'b' is paused: its user quit", "1 more node must join, or come back"),
    ],
)
async def test_to_lose_an_idle_node_on_purpose_is_no_warning(
    model: Path, caplog: pytest.LogCaptureFixture, leaves: bool, told: str, waited_for: str
) -> None:
    caplog.set_level(logging.INFO)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            duty = cluster.duties["b"]
            (duty.leave if leaves else duty.pause)("its user quit")
            status = await cluster.until(lambda status: "must join" in status.detail)
            assert status.detail == f"{told}; {waited_for}"
    assert f"route 1 ended: {told}" in caplog.messages
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_node_that_pauses_before_it_has_taken_over_is_no_warning(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with trio.fail_after(SECONDS):
        async with (
            memory_cluster(model, "a", max_nodes=1, rebalance=False) as cluster,
            cluster.join("slow", free_memory=2**26, max_memory_bytes=2**26) as slow,
        ):
            await cluster.ready()
            cluster.duties["a"].pause("a game")
            assert isinstance((await slow.receive()).message, Assignment)
            await slow.send(Pause("a game here too"))
            await cluster.until(lambda _: states(cluster) == {"a": "paused", "slow": "paused"})
    assert "the next route could not be made: node 'slow' is paused: a game here too" in caplog.messages
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_node_that_says_goodbye_is_gone_for_that_reason(
    model: Path, prompt: tuple[int, ...], inside: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("guest") as guest:
                await cluster.until(lambda status: len(status.nodes) == 2)
                member = inside(cluster).members.all()[-1]
                await guest.send(Leave("its user quit"))
                await cluster.until(lambda status: len(status.nodes) == 1)
                assert member.gone_because == "its user quit"


async def test_a_node_that_holds_nothing_leaves_at_once_also_without_a_coordinator(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3) as cluster:
            await cluster.start_node("a")
            cluster.duties["a"].leave("its user quit")
            await cluster.until(lambda status: not status.nodes)
            far = Machine(cluster.network)
            await cluster.start_node("b", machine=far)
            far.unplug()
            cluster.stop_node("b")


async def test_a_host_that_ends_says_so_to_its_nodes(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3) as cluster, cluster.join("a") as link:
            assert cluster._nursery is not None
            cluster._nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                assert (await link.receive()).message == Leave("its host ended it")
                with pytest.raises(ChannelClosed):
                    await link.receive()


async def test_a_node_that_leaves_waits_no_longer_than_it_was_told(
    model: Path, prompt: tuple[int, ...], gate: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", recovery_time=0) as cluster:
            await cluster.ready()
            gate.close_after(3)
            async with cluster.generating(prompt, TOKENS) as running:
                cluster.duties["a"].leave("its user quit", patience=0.2)
                with pytest.raises(RouteError, match=r"node 'a' was lost.*: its user quit"):
                    await running.result()
            gate.open()
