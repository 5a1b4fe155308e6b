"""Routes that break at an awkward moment."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from core.coordinator.admission import Admission
from core.coordinator.chunk_sizing import ChunkSizing
from core.coordinator.decoding import Decoding
from core.coordinator.hop import Hop
from core.coordinator.members import Member
from core.coordinator.planning import Planning
from core.coordinator.route import Route
from core.coordinator.router import MAX_LOST_ROUTES, Router
from core.coordinator.scheduler import Scheduler
from core.coordinator.service import Parting, RouteService
from core.coordinator.session import Place, Session, Status
from core.coordinator.telemetry import Telemetry
from core.coordinator.waiting_queue import WaitingQueue
from core.errors import RouteError
from core.interfaces.engine import ClusterStatus, GenerationRequest
from core.interfaces.planner import Plan, StagePlan
from core.protocol.codec import Packet
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import HiddenState, RunPrefill
from core.runtime.cuts import Cuts
from core.runtime.model import Precision
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import RunningText, memory_cluster

PRECISION = cast(Precision, None)
ROW = Tensor("fp32", 1, 1, bytes(4))
BATCH = RunPrefill(1, [Segment(1, 0, 1, 1)], ROW)
ANSWER = HiddenState(1, ROW)


class Empty:
    """A link on which everything is sent at once."""

    async def send(self, *_: Any) -> None:
        await trio.lowlevel.checkpoint()


async def test_an_answer_that_comes_after_its_route_broke_is_not_sampled() -> None:
    member = cast(Member, SimpleNamespace(node_id="a", link=Empty()))
    route = Route(1, [Hop(1, member, range(1), PRECISION)])
    begun: list[HiddenState] = []
    ticket = await route.submit(BATCH)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_refused, route, ticket, begun)
            await trio.testing.wait_all_tasks_blocked()
            route.fail(RouteError("the link was lost"))
            await route.take(member, 1, Packet(ANSWER, request_id="1"))
    assert begun == []


async def _refused(route: Route, ticket: Any, begun: list[HiddenState]) -> None:
    with pytest.raises(RouteError, match="the link was lost"):
        await route.answer(ticket, begin=begun.append)


async def test_a_route_that_breaks_while_a_better_plan_is_made_is_followed_at_once(
    model: Path, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer, plan = trio.Event(), trio.Event(), Planning.plan

    async def slow_plan(planning: Planning, members: Sequence[Member], **options: Any) -> Plan:
        made = await plan(planning, members, **options)
        if options.get("beside"):
            asked.set()
            await answer.wait()
        return made

    monkeypatch.setattr(Planning, "plan", slow_plan)
    with trio.fail_after(300):
        async with memory_cluster(model, "a", "b", rebalance=False) as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            within = inside(cluster)
            await cluster.coordinator.rebalance()
            await asked.wait()
            cluster.stop_node("a")
            await cluster.until(lambda _: within.router.services == [])
            answer.set()

            def serves_anew(status: ClusterStatus) -> bool:
                assert status.state != "ready" or within.router.serving is not None
                return status.state == "ready"

            await cluster.until(serves_anew)


async def test_a_session_that_moves_while_it_is_queued_is_not_run_on_the_route_that_it_left(
    model: Path, prompt: tuple[int, ...], inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, opened, run = threading.Event(), threading.Event(), Stage.run

    def gated(stage: Stage, hidden: Any, segments: Sequence[Segment], **options: Any) -> Any:
        if stage.layers == range(3, 6) and segments[0].session != 0:
            arrived.set()
            assert opened.wait(300)
        return run(stage, hidden, segments, **options)

    def without_b(*_: object) -> Plan:
        return Plan((StagePlan("a", 0, 3, 1), StagePlan("c", 3, 6, 1)))

    with trio.fail_after(300):
        options = {"planner": "balanced", "prefix_cache": False, "speculation": False, "max_chunk": len(prompt)}
        async with memory_cluster(model, "a", "b", **options) as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            expected = await cluster.text(prompt, 150)
            monkeypatch.setattr(Stage, "run", gated)
            running = [RunningText() for _ in range(6)]
            async with trio.open_nursery() as nursery:
                for each in running:
                    nursery.start_soon(each.run, cluster.coordinator, GenerationRequest(prompt, 150, temperature=0))
                await cluster.until(lambda _: arrived.is_set() and cluster.coordinator.status().sessions == 6)
                monkeypatch.setattr("core.coordinator.planning.planned", without_b)
                await cluster.coordinator.rebalance()
                await cluster.ready(after_epoch=1)
                opened.set()
            assert [await each.result() for each in running] == [expected] * 6
            admission = inside(cluster).service.admission
            assert (admission.running, admission.budget.reserved) == ({}, 0)


class Commands:
    """An admission with nobody, under which the route breaks while a cache command is sent."""

    def __init__(self) -> None:
        self.running: dict[int, Session] = {}

    def any_decodes(self) -> bool:
        return False

    async def send_commands(self, route: Route) -> None:
        route.fail(RouteError("another has taken its place"))
        await trio.testing.wait_all_tasks_blocked()


async def test_a_route_that_breaks_while_a_cache_command_is_sent_is_served_no_longer() -> None:
    route = Route(1, [Hop(1, cast(Member, SimpleNamespace(node_id="a", link=Empty())), range(1), PRECISION)])
    nothing = cast(Any, None)
    scheduler = Scheduler(route, nothing, nothing, cast(Admission, Commands()), ChunkSizing(16, 512), nothing, nothing)
    with trio.fail_after(300):
        await scheduler.run()


def test_who_waits_for_more_room_gets_it_also_on_a_route_that_is_closed() -> None:
    route = SimpleNamespace(
        epoch=1,
        hops=[SimpleNamespace(number=1)],
        kv_tokens=512,
        kv_capacity=512,
        fits=lambda rooms: sum(rooms.elements()) <= 512,
        is_settled=True,
        failure=None,
    )
    queue, begun = WaitingQueue(), []
    options = {"max_sessions": 4, "answer_tokens": 40, "keeps": False, "cuts": Cuts()}
    admission = Admission(cast(Route, route), queue, begun.append, lambda: None, **options)
    first, second = (_unbounded(number) for number in (1, 2))
    for session in (first, second):
        queue.add(session, math.inf)
    admission.admit()
    assert begun == [first, second]
    first.tokens += [7] * 256
    assert not admission.has_room(first)
    admission.close()
    admission.move_out(second)
    admission.admit()
    assert begun == [first, second, first]


def _unbounded(number: int) -> Session:
    decoding = SimpleNamespace(bounded=False, max_tokens=500, prompt_logprobs_asked=None)
    return Session(number, [5] * 20, cast(Decoding, decoding))


async def test_nodes_that_pause_as_often_as_they_like_are_not_held_against_a_request() -> None:
    router, session = Router(60, Telemetry()), _unbounded(1)
    parting = Parting("node 'a' is paused", "a game")
    for epoch in range(2 * MAX_LOST_ROUTES):
        session.admit(Place(epoch, cache=1, reserved=256, in_flight=1))
        router.queue.remove(session)
        admission = SimpleNamespace(is_open=True, running={1: session})
        service = SimpleNamespace(route=SimpleNamespace(failure=parting), admission=admission, ended=trio.Event())
        router.services.append(cast(RouteService, service))
        router.close(cast(RouteService, service))
        assert session.status is Status.SUSPENDED
    assert session.lost_routes == 0
