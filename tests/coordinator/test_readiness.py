"""A route is ready when a real token has passed through it; before, whoever asks is told the numbers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.coordinator import live
from core.coordinator.head import Head
from core.coordinator.members import FAILED_SECONDS
from core.coordinator.readiness import State
from core.coordinator.supervisor import RETRY_SECONDS, Supervisor
from core.errors import NotReady, StageError
from core.interfaces.checkpoint import Source
from core.interfaces.engine import GenerationRequest
from core.interfaces.planner import Plan, PlanRequest, StagePlan
from core.plugins import PluginHost
from core.runtime.model import Model
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster, pass_time

SECONDS = 300
REQUEST = GenerationRequest((5, 6, 7), max_tokens=1, temperature=0)


async def refusal(cluster: MemoryCluster) -> NotReady:
    with pytest.raises(NotReady) as caught:
        async with cluster.coordinator.generate(REQUEST):
            pass
    return caught.value


async def test_whoever_comes_too_early_is_told_how_many_nodes_are_missing(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2) as cluster:
            await cluster.until(lambda status: "more node" in status.detail)
            early = await refusal(cluster)
            assert (early.required, early.ready) == (2, 0)
            assert "2 more nodes must join" in str(early)
            await cluster.start_node("a")
            await cluster.until(lambda status: "1 more node must join" in status.detail)
            early = await refusal(cluster)
            assert (early.required, early.ready) == (2, 1)
            assert "1 more node must join" in str(early)
            status = cluster.coordinator.status()
            assert (status.state, status.required_nodes, status.ready_nodes, status.route_epoch) == ("waiting", 2, 1, 0)
            await cluster.start_node("b")
            status = await cluster.ready()
            assert (status.required_nodes, status.ready_nodes, status.route_epoch) == (2, 2, 1)
            assert await cluster.text((5, 6, 7), 1)


async def test_the_api_answers_before_the_model_is_opened(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3) as cluster:
            early = await refusal(cluster)
            assert (early.required, early.ready) == (3, 0)
            assert early.message


async def test_the_event_loop_asks_no_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question to a GPU takes seconds, in which the API would not answer."""
    asked_in: list[threading.Thread] = []
    free_memory = live.free_memory

    def noted(device: torch.device) -> int:
        asked_in.append(threading.current_thread())
        return free_memory(device)

    monkeypatch.setattr(live, "free_memory", noted)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
    assert asked_in
    assert threading.current_thread() not in asked_in


async def test_a_model_that_does_not_fit_is_waited_for_with_the_bytes_that_are_missing(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            await cluster.start_node("small", max_memory=2**20)
            await cluster.until(lambda status: "does not fit" in status.detail)
            early = await refusal(cluster)
            assert "take 2 MB" in str(early)
            assert early.ready == 1
            await cluster.start_node("large")
            await cluster.ready()


async def test_ready_means_that_a_token_came_out(model: Path, gate: Any) -> None:
    gate.close_after(0)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", recovery_time=0) as cluster:
            await cluster.until(lambda _: gate.arrived == 1)
            await wait_all_tasks_blocked(0.05)
            status = cluster.coordinator.status()
            assert status.state != "ready"
            assert [node.state for node in status.nodes] == ["loaded", "loaded"]
            assert (await refusal(cluster)).ready == 2
            gate.open()
            status = await cluster.ready()
            assert gate.arrived == 2, "one token through two stages"
            assert [node.state for node in status.nodes] == ["ready", "ready"]
            await cluster.until(lambda status: all(node.sessions == 0 for node in status.nodes))


async def test_whoever_comes_while_a_route_is_made_waits_for_it(model: Path, gate: Any) -> None:
    gate.close_after(0)
    texts: list[str] = []

    async def generate(cluster: MemoryCluster) -> None:
        texts.append(await cluster.text((5, 6, 7), 4))

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.until(lambda _: gate.arrived == 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate, cluster)
                await cluster.until(lambda status: [each.phase for each in status.generations] == ["waiting"])
                assert cluster.coordinator.status().state == "loading"
                gate.open()
            assert texts == [await cluster.text((5, 6, 7), 4)]


@pytest.mark.parametrize("fault", ["a stage fails", "logits are not finite", "rows of another width"])
async def test_a_route_that_fails_its_proof_is_not_ready_and_says_why(
    model: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = Stage.run

    def faulty(stage: Stage, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = run(stage, hidden, *args, **kwargs)
        if fault == "a stage fails":
            raise StageError("the fan has stopped")
        return result * float("nan") if fault == "logits are not finite" else result[:, :-1]

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, recovery_time=0) as cluster:
            with monkeypatch.context() as patch:
                patch.setattr(Stage, "run", faulty)
                await cluster.start_node("a")
                await cluster.until(lambda status: "failed its proof" in status.detail)
                words = {"a stage fails": "the fan has stopped", "logits are not finite": "not finite"}
                assert words.get(fault, "hidden states of 1 x 63") in str(await refusal(cluster))
            await pass_time(clock, FAILED_SECONDS + 1)
            status = await cluster.ready()
            assert status.detail == ""
            assert await cluster.text((5, 6, 7), 1)


async def test_the_proof_asks_the_head_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = Head.check

    def noted(head: Head, hidden: Any, node: str) -> None:
        check(head, hidden, node)
        checked.append((hidden.rows, hidden.width))

    monkeypatch.setattr(Head, "check", noted)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
    assert checked == [(1, 64)]


async def test_whatever_the_head_raises_fails_the_proof_and_not_the_coordinator(
    model: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            with monkeypatch.context() as patch:
                patch.setattr(Head, "check", broken)
                await cluster.start_node("a")
                await cluster.until(lambda status: "head failed: RuntimeError: out of memory" in status.detail)
            await pass_time(clock, RETRY_SECONDS + 1)
            await cluster.ready()


async def test_whatever_a_planner_raises_is_told_with_its_name(
    model: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    with trio.fail_after(SECONDS + FAILED_SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            with monkeypatch.context() as patch:
                patch.setattr(type(PluginHost.installed().planners.get("measured")), "plan", broken)
                await cluster.start_node("a")
                await cluster.until(lambda status: "'measured' raised ZeroDivisionError" in status.detail)
            await pass_time(clock, FAILED_SECONDS + 1)
            await cluster.ready()


async def test_a_route_that_breaks_while_a_better_plan_is_made_is_not_said_to_serve(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, said = threading.Event(), threading.Event(), list[str]()
    planner = type(PluginHost.installed().planners.get("measured"))
    plan, become = planner.plan, Supervisor._become

    def slow(self: Any, request: PlanRequest) -> Plan:
        if request.in_haste:
            return plan(self, request)
        begun.set()
        assert go_on.wait(SECONDS)
        return Plan((StagePlan("b", 0, 6, sum(request.layer_bytes)),))

    def noted(self: Supervisor, state: State, detail: str) -> None:
        said.append(detail)
        become(self, state, detail)

    monkeypatch.setattr(planner, "plan", slow)
    monkeypatch.setattr(Supervisor, "_become", noted)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", max_nodes=1, rebalance=False) as cluster:
            await cluster.ready()
            await cluster.start_node("b")
            await cluster.coordinator.rebalance()
            await cluster.until(lambda _: begun.is_set())
            cluster.stop_node("a")
            try:
                await cluster.ready(after_epoch=1)
            finally:
                go_on.set()
            assert [detail for detail in said if "beside the one that serves" in detail] == []


async def test_after_a_route_broke_as_many_nodes_are_required_as_before_it(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            await cluster.start_node("a", max_memory=2**20)
            await cluster.start_node("b", max_memory=2**20)
            assert (await cluster.ready()).required_nodes == 2
            cluster.stop_node("b")
            status = await cluster.until(lambda status: "does not fit" in status.detail)
            assert status.required_nodes == 1


async def test_a_model_is_closed_only_when_nothing_reads_it_any_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator ends while it loads."""
    order: list[str] = []
    begun, go_on, leave = threading.Event(), threading.Event(), trio.Event()
    checkpoint = type(PluginHost.installed().open_checkpoint(Source(str(model))))
    load_embed_and_head, end = Model.load_embed_and_head, checkpoint.close

    def held_up(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(SECONDS)
        loaded = load_embed_and_head(*args)
        order.append("read")
        return loaded

    def close(self: Any) -> None:
        order.append("closed")
        end(self)

    async def go_on_after_the_cancellation() -> None:
        await leave.wait()
        go_on.set()

    monkeypatch.setattr(Model, "load_embed_and_head", held_up)
    monkeypatch.setattr(checkpoint, "close", close)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on_after_the_cancellation)
            async with memory_cluster(model) as cluster:
                await cluster.until(lambda _: begun.is_set())
                leave.set()
    assert order == ["read", "closed"]
