"""Machines that come and go on purpose: the next route is made beside the one that serves, and texts move over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from core_plugin_planner.measured import MeasuredPlanner
from trio.testing import MockClock

from core.coordinator.improvement import REBALANCE_SECONDS
from core.interfaces.engine import ClusterStatus
from core.interfaces.planner import Plan, PlanRequest, StagePlan
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time

SECONDS = 300
TOKENS = 24


def layers_of(status: ClusterStatus) -> dict[str, tuple[int, int]]:
    return {node.node_id: node.layers for node in status.nodes if node.layers is not None}


def loads_of(machine: Machine) -> list[int]:
    """The bytes that each of its loads has read."""
    envelopes = [msgpack.unpackb(frame) for frame in machine.sent]
    return [envelope["payload"]["read_bytes"] for envelope in envelopes if envelope["type"] == "LOAD_COMPLETE"]


def recoveries(cluster: MemoryCluster) -> float:
    [found] = [metric for metric in cluster.coordinator.metrics() if metric.name == "core_recoveries"]
    return found.samples[0].value


async def test_a_loss_does_not_wait_for_a_better_plan_that_is_being_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, released, plan = threading.Event(), threading.Event(), MeasuredPlanner.plan

    def slow(planner: MeasuredPlanner, request: PlanRequest) -> Plan:
        if not request.in_haste:
            asked.set()
            assert released.wait(SECONDS)
        return plan(planner, request)

    monkeypatch.setattr(MeasuredPlanner, "plan", slow)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", rebalance=True) as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            await cluster.until(lambda _: asked.is_set())
            cluster.stop_node("b")
            try:
                status = await cluster.ready(after_epoch=1)
            finally:
                released.set()
            assert set(layers_of(status)) == {"a", "c"}


@pytest.mark.parametrize("way", ["pause", "leave"])
async def test_nobody_notices_that_a_machine_goes_on_purpose(
    model: Path, prompt: tuple[int, ...], oracle: str, way: str, gate: Any, loading: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            gate.close_after(3)
            async with cluster.generating(prompt, 400) as running:
                await cluster.until(lambda _: gate.waiting)
                loading.hold()
                duty = cluster.duties["b"]
                (duty.pause if way == "pause" else duty.leave)("a game")
                await cluster.until(lambda status: "beside the one that serves" in status.detail)
                assert cluster.coordinator.status().state == "ready"
                gate.open()
                assert await cluster.text(prompt, TOKENS) == oracle, "served while the next route loads"
                loading.go_on()
                await cluster.ready(after_epoch=1)
                assert await cluster.text(prompt, TOKENS) == oracle
                assert (await running.result()).startswith(oracle)
            assert recoveries(cluster) == 0, "no route broke"
            if way == "leave":
                await cluster.until(lambda status: all(node.node_id != "b" for node in status.nodes))
            else:
                await cluster.until(lambda status: status.nodes[1].state == "paused")
            assert set(layers_of(cluster.coordinator.status())) == {"a", "c"}


async def test_the_text_of_a_paused_machine_moves_and_is_told_once(
    model: Path, prompt: tuple[int, ...], gate: Any, stages: list[Stage]
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", prefix_cache=False) as cluster:
            await cluster.ready()
            undisturbed = await cluster.text(prompt, 300)
            await cluster.start_node("c")
            gate.close_after(20)
            async with cluster.generating(prompt, 300) as running:
                await cluster.until(lambda _: gate.waiting)
                cluster.duties["b"].pause("a game")
                await cluster.until(lambda status: "beside the one that serves" in status.detail)
                gate.open()
                assert await running.result() == undisturbed
            await cluster.ready(after_epoch=1)
            await cluster.until(lambda status: status.nodes[1].state == "paused" and status.sessions == 0)
            await cluster.until(lambda status: not any(len(stage.caches) for stage in stages))


async def test_a_machine_that_pauses_keeps_no_layers_and_gets_them_again(model: Path, inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            held = {member.node_id: member for member in inside(cluster).members.all()}
            planning = inside(cluster).supervisor.planning
            cluster.duties["b"].pause("a game")
            await cluster.ready(after_epoch=1)
            await cluster.until(lambda _: planning.held(held["b"]) == frozenset())
            assert len(planning.held(held["a"]) | planning.held(held["c"])) == 6


async def test_if_memory_holds_no_two_routes_texts_wait_for_the_next(
    model: Path, prompt: tuple[int, ...], inside: Any, gate: Any
) -> None:
    """a and b each have room for 4 layers of 6, and c for 2."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            room = await room_for_layers(cluster, inside)
            await cluster.start_node("b", max_memory=room(4))
            await cluster.start_node("c", max_memory=room(2))
            await cluster.ready()
            assert layers_of(cluster.coordinator.status()) == {"b": (0, 4), "c": (4, 6)}
            undisturbed = await cluster.text(prompt, 100)
            await cluster.start_node("d", max_memory=room(4))
            gate.close_after(20)
            async with cluster.generating(prompt, 100) as running:
                await cluster.until(lambda _: gate.waiting)
                cluster.duties["b"].pause("a game")
                gate.open()
                assert await running.result() == undisturbed
            assert set(layers_of(await cluster.ready(after_epoch=1))) == {"c", "d"}


async def room_for_layers(cluster: MemoryCluster, inside: Any) -> Callable[[int], int]:
    """Bytes that hold so many layers of the model with the caches that are set aside for them, and half a one more."""
    await cluster.until(lambda _: cluster.coordinator._live is not None and cluster.coordinator._live.supervisor)
    planning = inside(cluster).supervisor.planning
    request = planning._request((), ())
    return lambda layers: int(request.layer_bytes[0] * (layers + 0.5))


class Speeds:
    """What nodes say of their speed, by id. They time no layers, which take microseconds here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_id: dict[str, int] = {}
        from core.node import connection, report

        hello = connection.hello

        def said(node: Any, *args: Any) -> Any:
            import msgspec

            return msgspec.structs.replace(hello(node, *args), speed=self.by_id.get(node.node_id, 10**6))

        monkeypatch.setattr(connection, "hello", said)
        monkeypatch.setattr(report, "layer_times", lambda node: [])


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    return Speeds(monkeypatch)


async def test_a_faster_newcomer_takes_part_without_anybody_waiting(
    model: Path, prompt: tuple[int, ...], speeds: Speeds, gate: Any
) -> None:
    speeds.by_id = {"quick": 10**9}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "slow", min_nodes=1, rebalance=True) as cluster:
            await cluster.ready()
            undisturbed = await cluster.text(prompt, 200)
            gate.close_after(20)
            async with cluster.generating(prompt, 200) as running:
                await cluster.until(lambda _: gate.waiting)
                await cluster.start_node("quick", max_memory=2**27)
                await cluster.until(lambda status: "beside the one that serves" in status.detail)
                gate.open()
                assert await running.result() == undisturbed
            await cluster.ready(after_epoch=1)
            await cluster.until(lambda status: layers_of(status) == {"quick": (0, 6)})
            assert recoveries(cluster) == 0


async def test_a_newcomer_that_makes_nothing_better_is_spare(model: Path, speeds: Speeds, clock: MockClock) -> None:
    with trio.fail_after(SECONDS + 3 * REBALANCE_SECONDS):
        async with memory_cluster(model, "a", min_nodes=1, rebalance=True) as cluster:
            await cluster.ready()
            await cluster.start_node("b", max_memory=2**27)
            await pass_time(clock, 2 * REBALANCE_SECONDS)
            status = cluster.coordinator.status()
            assert (status.route_epoch, layers_of(status)) == (1, {"a": (0, 6)})
            assert status.nodes[1].state == "spare"


async def test_plans_are_never_made_back_and_forth(model: Path, speeds: Speeds, clock: MockClock) -> None:
    """A quick node that comes and goes moves the layers once each minute at most."""
    speeds.by_id = {"quick": 10**9}
    with trio.fail_after(SECONDS + 10 * REBALANCE_SECONDS):
        async with memory_cluster(model, "slow", min_nodes=1, rebalance=True) as cluster:
            await cluster.ready()
            await cluster.start_node("quick", max_memory=2**27)
            await cluster.ready(after_epoch=1)
            for _ in range(2):
                epoch = cluster.coordinator.status().route_epoch
                cluster.stop_node("quick")
                await cluster.until(lambda status: [node.node_id for node in status.nodes] == ["slow"])
                await cluster.ready(after_epoch=epoch)
                await cluster.start_node("quick", max_memory=2**27)
                await pass_time(clock, REBALANCE_SECONDS / 2)
                status = cluster.coordinator.status()
                assert (status.route_epoch, layers_of(status)) == (epoch + 1, {"slow": (0, 6)}), "too soon"
                await pass_time(clock, REBALANCE_SECONDS)
                await cluster.ready(after_epoch=epoch + 1)
                await cluster.until(lambda status: layers_of(status) == {"quick": (0, 6)})
            cluster.stop_node("quick")
            await cluster.ready(after_epoch=epoch + 2)
            await cluster.start_node("quick", max_memory=2**27)
            await cluster.until(lambda status: any("again and again" in node.detail for node in status.nodes))
            await pass_time(clock, 2 * REBALANCE_SECONDS)
            assert layers_of(cluster.coordinator.status()) == {"slow": (0, 6)}, "whoever went so often is not trusted"


async def test_a_host_may_forbid_it_and_ask_for_it(model: Path, speeds: Speeds, clock: MockClock) -> None:
    speeds.by_id = {"quick": 10**9}
    with trio.fail_after(SECONDS + 3 * REBALANCE_SECONDS):
        async with memory_cluster(model, "slow", min_nodes=1, rebalance=False) as cluster:
            await cluster.ready()
            await cluster.start_node("quick", max_memory=2**27)
            await pass_time(clock, 2 * REBALANCE_SECONDS)
            assert layers_of(cluster.coordinator.status()) == {"slow": (0, 6)}
            assert "takes the place of the one that serves" in await cluster.coordinator.rebalance()
            await cluster.ready(after_epoch=1)
            await cluster.until(lambda status: layers_of(status) == {"quick": (0, 6)})


async def test_a_stand_in_has_the_layers_that_a_loss_would_need(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", standby=True, rebalance=False) as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            member = inside(cluster).members.all()[-1]
            planning = inside(cluster).supervisor.planning
            await cluster.until(lambda _: planning.held(member) == frozenset(range(6)))
            async with cluster.generating(prompt, TOKENS) as running:
                cluster.stop_node("a")
                assert await running.result() == oracle
            assert loads_of(cluster.machines["c"])[-1] == 0, "nothing was left to be read"
            await cluster.ready(after_epoch=1)
            await cluster.until(lambda status: layers_of(status) == {"b": (3, 6), "c": (0, 3)})


async def test_nodes_without_layers_hold_none_unless_they_stand_in(model: Path, inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            await cluster.until(lambda status: status.nodes[2].state == "spare")
            assert loads_of(cluster.machines["c"]) == []


async def test_a_better_plan_that_memory_has_no_room_for_beside_is_loaded_while_texts_wait(
    model: Path, prompt: tuple[int, ...], speeds: Speeds, inside: Any, gate: Any
) -> None:
    """b holds all 6 layers and has room for no others; the quick node needs it for one of them."""
    speeds.by_id = {"quick": 10**9}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, rebalance=True) as cluster:
            room = await room_for_layers(cluster, inside)
            await cluster.start_node("a", max_memory=room(3))
            await cluster.start_node("b", max_memory=room(3))
            await cluster.ready()
            undisturbed = await cluster.text(prompt, 100)
            gate.close_after(20)
            async with cluster.generating(prompt, 100) as running:
                await cluster.until(lambda _: gate.waiting)
                await cluster.start_node("quick", max_memory=room(5))
                gate.open()
                assert await running.result() == undisturbed
            status = await cluster.ready(after_epoch=1)
            assert "quick" in layers_of(status)


async def test_a_machine_may_have_the_first_layers_and_the_last(
    model: Path, prompt: tuple[int, ...], oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outer(_: object, request: PlanRequest) -> Plan:
        home, away = (candidate.node_id for candidate in request.candidates)
        return Plan((StagePlan(home, 0, 1, 1), StagePlan(away, 1, 5, 4), StagePlan(home, 5, 6, 1)))

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "home", "away") as cluster:
            await cluster.ready()
            undisturbed = await cluster.text(prompt, 120)
            monkeypatch.setattr("core.coordinator.planning.planned", outer)
            await cluster.coordinator.rebalance()
            status = await cluster.ready(after_epoch=1)
            assert [hop.node_id for hop in status.hops] == ["home", "away", "home"]
            assert await cluster.text(prompt, TOKENS) == oracle
            async with cluster.generating(prompt, 120) as running:
                await cluster.until(lambda status: status.sessions == 1)
                cluster.network.sever(cluster.machines["home"].port)
                await cluster.ready(after_epoch=2)
                assert await running.result() == undisturbed
