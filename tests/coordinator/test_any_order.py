"""Nodes and requests that come and go in any order: no text differs from an undisturbed one, and nothing is left over.

CORE_FUZZ=20 tries 20 times as many orders; --hypothesis-seed=N others. An order that failed is not made shorter: what
threads and links do meanwhile differs from one time to the next.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from core.coordinator.router import MAX_LOST_ROUTES
from core.coordinator.session import Session, Status
from core.errors import CheckpointError, DeadlineExceeded, NotReady, RouteError
from core.interfaces.engine import ClusterStatus, GenerationRequest, Grammar
from core.node.agent import run_node
from core.node.connection import Connection
from core.node.hop import Hop
from core.node.settings import NodeSettings
from core.node.stage_loader import Loaded, StageLoader
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster

TIMES = int(os.environ.get("CORE_FUZZ", "1"))
ORDERS = 15 * TIMES
SECONDS = 900
"""For one order, with all that it leaves behind: many times what it takes."""
SOON = 100
NODES = ("a", "b", "c")
ENOUGH = 2
STREAMS = 8
TIGHT = 443_904 + 1280 * 768
"""Memory for half of the tiny model's layers, and 1280 tokens in them."""
ROOMY = 2**26
PATIENCE = 0.4
QUICK = {
    "core.coordinator.supervisor.RETRY_SECONDS": 0.05,
    "core.coordinator.pauses.DRAIN_SECONDS": PATIENCE,
    "core.coordinator.improvement.REBALANCE_SECONDS": 0.1,
    "core.coordinator.supervisor.GATHER_SECONDS": 0.1,
    "core.coordinator.members.FAILED_SECONDS": 0.2,
    "core.coordinator.route.VERDICT_SECONDS": 0.2,
    "core.node.agent.FIRST_WAIT_SECONDS": 0.02,
    "core.node.agent.SOON_WAIT_SECONDS": 0.1,
    "core.node.report._STATE_SECONDS": 0.02,
    "core.coordinator.service.NEARLY_DONE": 8,
    "core.coordinator.session.READ_AHEAD": 6,
}
SMALL = {"min_nodes": ENOUGH, "rebalance": True, "answer_tokens": 40, "max_chunk": 48}
PROMPT = tuple(range(40, 60))
LONG = tuple(20 + 7 * place % 230 for place in range(150))
LEAVES_AFTER = 90
Step = tuple[str, str, int]
"""What is done, to which node, and which or how many."""


def requests() -> list[GenerationRequest]:
    sampled = GenerationRequest(PROMPT, max_tokens=90, temperature=1, seed=7, logprobs=0, ignore_eos=True)
    greedy = GenerationRequest(PROMPT, max_tokens=24, temperature=0)
    return [
        greedy,
        replace(greedy, prompt=(*PROMPT, *LONG[:30]), max_tokens=120, logprobs=0, client="x"),
        replace(greedy, prompt=LONG, max_tokens=60, stop=("e", "a")),
        replace(greedy, prompt=LONG[:140], max_tokens=None, logprobs=0),
        replace(greedy, prompt=LONG[:50], max_tokens=1, prompt_logprobs=0),
        sampled,
        replace(sampled, prompt=LONG[:90], seed=3, frequency_penalty=0.5, repetition_penalty=1.2, client="x"),
        replace(sampled, prompt=LONG[:130], seed=5, max_tokens=50, grammar=Grammar("json_object")),
        replace(sampled, prompt=LONG[:20], seed=11, max_tokens=200, top_p=0.9),
    ]


@dataclass
class Told:
    """All that the reader of a generation has been told."""

    text: str = ""
    tokens: int = 0
    ids: tuple[int, ...] = ()
    finish: str | None = None

    def follows(self, whole: Told) -> bool:
        """Whether `whole` begins with it."""
        return whole.text.startswith(self.text) and self.ids == whole.ids[: len(self.ids)]


class Stream:
    """A request, from its asking to its end, in a task of its own."""

    def __init__(self, request: GenerationRequest, whole: Told | None = None, *, pause: float = 0) -> None:
        """`whole` None: what it is told is held against nothing."""
        self.request, self.whole, self.told, self.pause = request, whole, Told(), pause
        self.session: Session | None = None
        self.ended, self.error = trio.Event(), None
        self.scope = trio.CancelScope()
        self._has_left = False

    async def run(self, cluster: MemoryCluster) -> None:
        try:
            with self.scope:
                await self._read(cluster)
        except (RouteError, NotReady, DeadlineExceeded) as error:
            self.error = error
        finally:
            self.ended.set()

    async def _read(self, cluster: MemoryCluster) -> None:
        async with cluster.coordinator.generate(self.request) as self.session:
            async for delta in self.session:
                told = self.told
                assert told.finish is None
                assert delta.tokens > told.tokens
                assert self.request.logprobs is None or len(delta.logprobs) == delta.tokens - told.tokens
                ids = (*told.ids, *(logprob.token for logprob in delta.logprobs))
                self.told = told = Told(told.text + delta.text, delta.tokens, ids, delta.finish_reason)
                assert self.whole is None or told.follows(self.whole), f"{self}: {told} where {self.whole} was to come"
                if self.request.max_tokens is None and told.tokens >= LEAVES_AFTER:
                    self._has_left = True
                    return
                await trio.sleep(self.pause)

    def judge(self) -> None:
        """It has all its text, or a reason that may be."""
        assert self.told.follows(self.whole)
        if self.told.finish is not None:
            assert self.told == self.whole, f"{self}: {self.told} where {self.whole} was to come"
            assert self.request.prompt_logprobs is None or len(self.session.prompt_logprobs) == len(self.request.prompt)
        elif isinstance(self.error, NotReady):
            assert self.session is None, f"{self}: it ran, and then: {self.error}"
        elif isinstance(self.error, RouteError):
            assert self.session is not None
            assert self.session.lost_routes >= MAX_LOST_ROUTES, f"{self}: {self.error}"
        elif not isinstance(self.error, DeadlineExceeded):
            assert self._has_left or self.scope.cancelled_caught, f"{self} ended with {self.told}"


class World:
    """A cluster with streams, and what a test can do to them. What makes no sense at the moment is not done."""

    def __init__(self, cluster: MemoryCluster, inside: Any, wholes: list[Told], nursery: trio.Nursery) -> None:
        self.cluster, self.inside, self.wholes, self.nursery = cluster, inside, wholes, nursery
        self.memory = ROOMY
        self.streams: list[Stream] = []
        self.connections: list[Connection] = []
        self.stages: dict[Machine, list[Stage]] = {}
        self.troubles: dict[Machine, list[str]] = {}  # of the next loads
        self.processes: dict[str, trio.Event] = {}
        """Set when the node's process has ended."""
        self.over = threading.Event()
        """Nothing is slow any more."""

    @property
    def alive(self) -> list[str]:
        """Nodes that run and are not about to end."""
        running = [name for name, ended in self.processes.items() if not ended.is_set()]
        return [name for name in running if not self.cluster.duties[name].leaving]

    async def live(self, steps: list[Step]) -> None:
        for node in NODES[:ENOUGH]:
            await self.join(node)
        await self.cluster.ready()
        for kind, node, number in steps:
            await self.do(kind, node, number)
            self.check()
        await self.settle()

    async def do(self, kind: str, node: str, number: int) -> None:
        machine = self.cluster.machines.get(node)
        if kind == "join":
            await self.join(node)
        elif kind == "ask":
            self.ask(number)
        elif kind == "cancel":
            running = [stream for stream in self.streams if not stream.ended.is_set()]
            if running:
                running[number % len(running)].scope.cancel()
        elif kind == "rebalance":
            await self.cluster.coordinator.rebalance()
        elif kind == "wait":
            await trio.sleep((0, 0.01, 0.03, 0.1, 0.3)[number % 5])
        elif kind == "ready":
            await self.wait(lambda status: status.state == "ready", 1)
        elif kind == "read":
            before = [(stream, stream.told.tokens) for stream in self.streams]
            await self.wait(lambda _: any(stream.told.tokens > told + number for stream, told in before), 0.3)
        elif node in self.alive and machine is not None:
            self.befall(kind, node, machine)

    def befall(self, kind: str, node: str, machine: Machine) -> None:
        duty = self.cluster.duties[node]
        if kind == "kill":
            self.cluster.stop_node(node)
            self.processes[node].set()
        elif kind == "sever":
            machine.sever()
        elif kind == "cut":
            with suppress(KeyError):  # it listens nowhere while it is about to connect anew
                self.cluster.network.sever(machine.port)
        elif kind == "leave":
            duty.leave("it leaves", patience=2 * PATIENCE)
        elif kind == "pause":
            duty.pause("a game")
        elif kind == "resume":
            duty.resume()
        else:
            self.troubles[machine].append(kind)

    async def join(self, node: str) -> None:
        if node not in self.processes or self.processes[node].is_set():
            self.processes[node] = trio.Event()
            machine = Machine(self.cluster.network)
            self.troubles[machine] = []
            await self.cluster.start_node(node, machine=machine, max_memory=self.memory)

    def ask(self, number: int) -> None:
        if len(self.streams) == STREAMS:
            return
        which, how = number % len(self.wholes), number // len(self.wholes)
        request = requests()[which]
        if how == 3:
            request = replace(request, deadline=trio.current_time() + 0.3)
        stream = Stream(request, self.wholes[which], pause=0.02 if how == 1 else 0)
        self.streams.append(stream)
        self.nursery.start_soon(stream.run, self.cluster)

    async def wait(self, condition: Callable[[ClusterStatus], bool], seconds: float) -> None:
        with suppress(AssertionError):
            await self.cluster.until(condition, timeout=seconds)

    async def settle(self) -> None:
        """Whatever was done before: with enough nodes all streams end, and nothing of them is left."""
        self.over.set()
        for stream in self.streams:
            stream.pause = 0
        for node in NODES:
            if len(self.alive) < ENOUGH and node not in self.alive:
                if node in self.processes:
                    await self.processes[node].wait()
                await self.join(node)
        for node in self.alive:
            self.cluster.duties[node].resume()
        for stream in self.streams:
            await stream.ended.wait()
            stream.judge()
        last = None
        while last is None or last.told.finish is None:
            await self.cluster.ready()
            last = Stream(requests()[0], self.wholes[0])
            await last.run(self.cluster)
            last.judge()
        await self.wait(lambda _: not self.left_over(), SOON)
        assert self.left_over() == []

    def check(self) -> None:
        """What is true at any moment."""
        queued = self.inside.router.queue.sessions
        running = [session for service in self.inside.router.services for session in service.admission.running.values()]
        assert len(queued) + len(running) == len({*queued, *running}), "a session is in one place"
        for session in queued:
            assert session.place is None and session.status in (Status.WAITING, Status.SUSPENDED), session.status
        for service in self.inside.router.services:
            places = [session.place for session in service.admission.running.values()]
            assert service.admission.budget.reserved == sum(place.reserved for place in places)
            assert {place.epoch for place in places} <= {service.route.epoch}
        live = [stream.session for stream in self.streams if stream.session and not stream.session.is_over]
        assert {*live} <= {*queued, *running}, "somebody has every session"

    def left_over(self) -> list[str]:
        """What is there beside one route that serves nobody."""
        router, supervisor = self.inside.router, self.inside.supervisor
        if router.serving is None:
            return ["nothing serves"]
        found = [f"route {service.route.epoch} still" for service in router.services if service is not router.serving]
        admission = router.serving.admission
        running = chain.from_iterable(service.admission.running.values() for service in router.services)
        found += [f"session {session.number} {session.status} at {session.place}" for session in running]
        if admission.budget.reserved or admission._starved or admission._commands:
            found.append(f"{admission.budget.reserved} {admission._starved} {admission._commands}")
        if router.queue.sessions or self.cluster.coordinator.status().sessions:
            found.append(f"{router.queue.sessions} wait of {self.cluster.coordinator.status().sessions}")
        if (live := set(supervisor._routes.all())) != {router.serving.route}:
            found.append(f"the routes {[route.epoch for route in live]} are alive")
        return found + list(self._left_on_nodes({kept.cache for kept in admission.budget._kept}))

    def _left_on_nodes(self, kept: set[int]) -> Iterator[str]:
        latest = {each._node.node_id: each for each in self.connections}
        for member in self.inside.members.all():
            connection, expected = latest[member.node_id], {hop.number for hop in member.hops}
            if set(connection._hops) != expected:
                yield f"{member.node_id} has the hops {set(connection._hops)}, not {expected}"
            if (uses := set(connection._node.keeper._uses)) != expected:
                yield f"{member.node_id} uses layers for the hops {uses}, not {expected}"
            serving = [hop.stage for hop in connection._hops.values() if isinstance(hop, Hop)]
            for stage in self.stages.get(self.cluster.machines[member.node_id], []):
                caches = set(stage.caches._sessions)
                if caches != (kept if stage in serving else set()):
                    yield f"{member.node_id} caches {caches}, not {kept}, of {stage.layers} {stage in serving}"
            if member.node_id not in self.alive:
                yield f"{member.node_id} has not left"


@contextmanager
def watched(world: World) -> Iterator[None]:
    """`world` sees what its nodes have, and has its troubles come over them."""
    load, begin = StageLoader.load, Connection.__init__

    def troubled(loader: StageLoader, *args: Any) -> Loaded:
        machine = loader._plugins.transports.get(Machine.name)
        trouble = world.troubles[machine].pop(0) if world.troubles[machine] and not world.over.is_set() else ""
        if trouble == "slow begin":
            world.over.wait(0.3)
        elif trouble == "fail":
            raise CheckpointError("a disk is broken")
        loaded = load(loader, *args)
        if trouble == "slow end":
            world.over.wait(0.3)
        world.stages.setdefault(machine, []).append(loaded.stage)
        return loaded

    def noted(connection: Connection, *args: Any) -> None:
        begin(connection, *args)
        world.connections.append(connection)

    async def running(node: NodeSettings, *args: Any) -> None:
        ended = world.processes[node.node_id]
        try:
            await run_node(node, *args)
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLoader, "load", troubled)
        patch.setattr(Connection, "__init__", noted)
        patch.setattr("core.testing.cluster_in_memory.run_node", running)
        yield


@pytest.fixture(scope="module")
def wholes(model: Path, oracle: str) -> list[Told]:
    """What each request is told where nothing happens to it."""

    async def tell() -> list[Told]:
        streams = [Stream(request) for request in requests()]
        async with memory_cluster(model, "a", speculation=False, prefix_cache=False, max_sessions=1) as cluster:
            await cluster.ready()
            for stream in streams:
                await stream.run(cluster)
        return [stream.told for stream in streams]

    wholes = trio.run(tell)
    assert wholes[0].text == oracle
    return wholes


KINDS = {
    "join": 5, "leave": 1, "pause": 1, "resume": 2, "kill": 2, "sever": 2, "cut": 1, "slow begin": 1, "slow end": 1,
    "fail": 1, "ask": 7, "cancel": 1, "rebalance": 2, "wait": 3, "read": 4, "ready": 4,
}  # fmt: skip
WEIGHED = list(chain.from_iterable([kind] * weight for kind, weight in KINDS.items()))
STEPS = st.tuples(st.sampled_from(WEIGHED), st.sampled_from(NODES), st.integers(0, 35))
CALM = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
SWITCHES = dict.fromkeys(("prefix_cache", "standby", "speculation"), st.booleans())
OPTIONS = st.fixed_dictionaries({**SWITCHES, "memory": st.sampled_from([TIGHT, ROOMY])})


@given(options=OPTIONS, steps=st.lists(STEPS, min_size=5, max_size=25))
@settings(CALM, max_examples=ORDERS, derandomize=TIMES == 1, phases=[Phase.generate])
def test_whatever_happens_in_whatever_order_each_stream_is_told_all_of_its_text_once(
    model: Path, wholes: list[Told], inside: Any, caplog: pytest.LogCaptureFixture, options: Any, steps: list[Step]
) -> None:
    async def live() -> None:
        with trio.fail_after(SECONDS):
            async with memory_cluster(model, **SMALL, **options) as cluster, trio.open_nursery() as nursery:
                await cluster.until(lambda status: status.layers > 0)
                world = World(cluster, inside(cluster), wholes, nursery)
                world.memory = memory
                with watched(world):
                    await world.live(steps)

    memory = options.pop("memory")
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setattr(name, value)
        trio.run(live)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
