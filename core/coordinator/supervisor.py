"""Keeps a route alive: plans when enough nodes are there, builds, waits until it breaks, and plans anew."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

import trio

from core.coordinator.builder import LoadRefused, RouteBuilder
from core.coordinator.local_nodes import LOCAL_PREFIX
from core.coordinator.members import Member, Members
from core.coordinator.planning import node_memory, plan_request, planned
from core.coordinator.route import Route
from core.coordinator.settings import CoordinatorSettings
from core.errors import ChannelClosed, CoreError, NotReady, PlanError, ProtocolError, RouteError
from core.interfaces.planner import Candidate, Plan, Planner
from core.protocol.codec import Packet
from core.protocol.messages import CacheOrder, HiddenState, InferenceError, PeerLost, Release, Run

RETRY_SECONDS = 5.0
FAILED_SECONDS = 30.0
"""How long a node that could not load its layers is left out of plans."""
DRAIN_SECONDS = 30.0
"""What a node that pauses gives the generations that run on it."""
_DRAIN_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)


class _Parting(RouteError):
    """A node paused or left when nobody was served by it."""


class Supervisor:
    """The route of now, if any; and in `state` and `detail`, what stands between the cluster and being ready."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        members: Members,
        planner: Planner,
        builder: RouteBuilder,
        free_at_start: int,
        sessions: Callable[[], int],
        serve: Callable[[Route], Awaitable[None]],
    ) -> None:
        """`free_at_start`: bytes that the device of this machine had free before anything was loaded.

        `sessions` tells how many generations run; `serve` runs them on a route until it breaks.
        """
        self.state = "waiting"
        self.detail = ""
        self.required = settings.min_nodes
        self.epoch = 0
        self.left_out: Mapping[str, str] = {}
        self._settings = settings
        self._members = members
        self._planner = planner
        self._builder = builder
        self._free_at_start = free_at_start
        self._sessions = sessions
        self._serve = serve
        self._route: Route | None = None
        self._lost = ""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._excuse_the_paused)
            await self._keep_a_route()

    async def _keep_a_route(self) -> None:
        while True:
            plan = await self._next_plan()
            try:
                route = await self._build(plan)
            except CoreError as error:
                self._lose(error)
                self._become("waiting", self._lost)
                if not isinstance(error, LoadRefused):
                    await self._pause(RETRY_SECONDS)
                continue
            self._become("ready", "")
            self._lost = ""
            _log.info("route %d is ready: %s", route.epoch, _describe(plan))
            await self._serve(route)
            route.clear_broken()
            assert route.failure is not None
            self._lose(route.failure)

    def _lose(self, error: CoreError) -> None:
        """The route, or the one that was about to be."""
        self._lost = str(error)
        level = logging.INFO if isinstance(error, _Parting) else logging.WARNING
        _log.log(level, "route %d ended: %s", self.epoch, self._lost)
        self._drop_route()

    def ready_route(self) -> Route:
        """The route to begin a session on. Raises NotReady with the numbers and what is waited for."""
        if self.state == "ready" and self._route is not None and self._route.failure is None:
            return self._route
        raise NotReady(
            "the model is not ready", self.detail or self._lost, required=self.required, ready=self.ready_nodes()
        )

    def ready_nodes(self) -> int:
        """Nodes that could serve: those that have loaded, or before there is a plan, those that are there."""
        members = [member for member in self._members.all() if member.state not in ("failed", "paused")]
        if self.state == "waiting":
            return len(members)
        return sum(member.state in ("loaded", "ready") for member in members)

    async def take(self, member: Member, packet: Packet) -> None:
        """A route's message from a member: of the present epoch it goes to the route, of an older one nowhere."""
        message = packet.message
        route = self._route
        if not isinstance(message, (Run, CacheOrder, HiddenState, InferenceError, PeerLost)):
            raise ProtocolError(f"node {member.node_id!r} sent a {message.TYPE}")
        if route is not None and message.epoch == route.epoch:
            await route.take(member, packet)

    def member_joined(self, member: Member) -> None:
        """A newcomer that the route of now does without is spare; it counts when a plan is made next."""
        if self.state != "waiting":
            member.become("spare", "the cluster serves without it; it is in the next plan")
            _log.info("node %s is spare: %s", member.node_id, member.detail)

    def member_left(self, member: Member) -> None:
        if self._route is not None:
            self._route.member_left(member)

    def _pauses(self) -> list[str]:
        """Those that why the route was lost does not tell of."""
        paused = [member for member in self._members.all() if member.paused]
        said = [f"node {member.node_id!r} {member.absence}: {member.paused}" for member in paused]
        return [sentence for sentence in said if sentence not in self._lost]

    async def _excuse_the_paused(self) -> None:
        """Takes those that pause out of the route, once nobody is served by them, and frees what they hold."""
        while True:
            pausing = [member for member in self._members.all() if member.paused and not member.excused]
            for member in pausing:
                await self._excuse(member)
            if not pausing:
                await self._members.wait_change()

    async def _excuse(self, member: Member) -> None:
        route = self._route
        if route is not None and any(hop.member is member for hop in route.hops):
            await self._drain(route, member)
            if not member.paused:
                return
            kind = RouteError if self._sessions() else _Parting
            route.fail(kind(f"node {member.node_id!r} {member.absence}", member.paused, node=member.node_id))
        member.excused = True
        member.rest()
        await self._release([member])

    async def _drain(self, route: Route, member: Member) -> None:
        """While the route serves: until no generation runs on it, or the member resumes; no new one begins."""
        if self.state != "ready":
            return
        parts = "leaves" if member.leaves else "pauses"
        self._become("waiting", f"node {member.node_id!r} {parts}, what runs is finished first: {member.paused}")
        with trio.move_on_after(DRAIN_SECONDS):
            while self._sessions() and member.paused and route.failure is None:
                await self._pause(_DRAIN_POLL_SECONDS)
        if not member.paused and route.failure is None:
            self._become("ready", "")

    async def _next_plan(self) -> Plan:
        """Waits until the members that are there can hold the model, saying meanwhile what is missing."""
        while True:
            try:
                return self._plan()
            except PlanError as error:
                self._become("waiting", self._after_loss(str(error), *self._pauses()))
            await self._pause(FAILED_SECONDS)

    def _plan(self) -> Plan:
        members = [member for member in self._members.all() if not member.paused and not _failed_lately(member)]
        missing = self._settings.min_nodes - len(members)
        if missing > 0:
            raise PlanError(f"{missing} more node{'s' if missing > 1 else ''} must join")
        candidates = [self._candidate(member) for member in members]
        request = plan_request(
            self._builder.model,
            self._builder.precision,
            candidates,
            self._settings.min_nodes,
            self._settings.max_nodes,
        )
        return planned(self._planner, request)

    def _candidate(self, member: Member) -> Candidate:
        hello = member.hello
        if self._settings.local_nodes and not member.credential and member.node_id.startswith(LOCAL_PREFIX):
            memory = self._local_memory()
        else:
            memory = float(hello.free_memory or self._settings.target_node_memory or 0)
        usable = node_memory(memory, capped=hello.max_memory_bytes is not None)
        return Candidate(member.node_id, usable, hello.selected_device)

    def _local_memory(self) -> float:
        """Each local node's share, whatever the coordinator and its siblings hold by the time it measures."""
        ends = self._builder.model.ends_bytes(self._builder.precision)
        return max(0, self._free_at_start - ends) / self._settings.local_nodes

    async def _build(self, plan: Plan) -> Route:
        self.epoch += 1
        self.required = max(self._settings.min_nodes, len(plan.stages))
        self.left_out = dict(plan.left_out)
        self._become("loading", self._after_loss("the nodes load their layers"))
        _log.info("plan for route %d: %s", self.epoch, _describe(plan))
        members = {member.node_id: member for member in self._members.all()}
        await self._release(members[node_id] for node_id, _ in plan.left_out)
        return await self._builder.build(self.epoch, plan, members, self._set_route)

    async def _release(self, spare: Iterable[Member]) -> None:
        for member in spare:
            if member.state not in ("failed", "paused"):
                member.become("spare")
                member.layers, member.weight_bytes = None, 0
            try:
                await member.link.send(Release(self.epoch))
            except ChannelClosed:
                continue

    def _set_route(self, route: Route) -> None:
        self._route = route

    def _drop_route(self) -> None:
        if self._route is not None:
            self._route.fail(RouteError("the route is planned anew", self._lost))
        self._route = None
        self.required = self._settings.min_nodes
        for member in self._members.all():
            member.rest()

    def _after_loss(self, *now: str) -> str:
        return "; ".join(filter(None, (self._lost, *now)))

    def _become(self, state: str, detail: str) -> None:
        self.state, self.detail = state, detail
        self._members.notify()

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._members.wait_change()


def _failed_lately(member: Member) -> bool:
    return member.failed_at is not None and trio.current_time() - member.failed_at < FAILED_SECONDS


def _describe(plan: Plan) -> str:
    return ", ".join(f"{stage.node_id} [{stage.start}, {stage.end})" for stage in plan.stages)
