"""Makes routes and ends them: one when there is none, the next beside it when a better one can be had or is needed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio

from core.coordinator.absences import Absences
from core.coordinator.builder import LoadRefused, RouteBuilder
from core.coordinator.drift import DriftWatch
from core.coordinator.hop import Hop, HopState
from core.coordinator.housekeeping import Housekeeping
from core.coordinator.improvement import Better, Improvement
from core.coordinator.members import Member, Members
from core.coordinator.pauses import drain, excuse_the_paused, parting
from core.coordinator.planning import Planning, describe
from core.coordinator.readiness import State, ready_nodes
from core.coordinator.route import Route
from core.coordinator.router import Router
from core.coordinator.routes import Routes
from core.coordinator.service import Parting, Replaced, RouteService
from core.coordinator.settings import CoordinatorSettings
from core.coordinator.suspicion import AVOIDED, Suspicion
from core.errors import CoreError, NotReady, PlanError, PluginError, RouteError
from core.interfaces.planner import Plan
from core.interfaces.telemetry import PaceStatus
from core.protocol.messages import Release

FIRST_RETRY_SECONDS, RETRY_SECONDS = 0.1, 5.0
PLUGIN_RETRY_SECONDS = 600.0
"""A plugin that failed on this machine fails again: other members are no help."""
GATHER_SECONDS = 10.0
"""For how long nodes are waited for that hold the layers which others, back from an earlier run, do not."""
PLANNING = "a plan is made"
NO_MEMORY_FOR_TWO = "memory for two routes is not there: answers wait while the next one is loaded"
_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps a route alive. `make_service` gives a route that is loaded and proven its service.

    `on_change` is called when `state` or `detail` may have changed, `tell_pace` when a machine's pace has.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        members: Members,
        routes: Routes,
        planning: Planning,
        builder: RouteBuilder,
        router: Router,
        make_service: Callable[[Route], RouteService],
        on_change: Callable[[], None],
        tell_pace: Callable[[PaceStatus], None],
    ) -> None:
        self.state = State.WAITING
        self._said = PLANNING
        """What is waited for besides what was lost."""
        self.required = settings.min_nodes
        self.epoch = 0
        """Of the newest route that serves, or else of the one that is being made."""
        self.left_out: Mapping[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._members = members
        self.planning = planning
        self._builder = builder
        self._router = router
        self._make_service = make_service
        self._on_change = on_change
        self._housekeeping = Housekeeping(planning, builder, self._new_hop, in_memory=settings.standby)
        self._routes = routes
        self._suspicion = Suspicion()
        self._numbers = itertools.count(1)
        self._epochs = itertools.count(1)
        self._finishing: Member | None = None
        self._lost: CoreError | None = None
        """Why there is no route, if the last one ended."""
        self._improvement = Improvement(settings, planning, router)
        self.drift = DriftWatch(members, router, planning, tell_pace, self._drifted)
        self._failures = 0
        """Builds in a row that came to nothing."""
        self._is_stuck = False
        """Whether requests are refused: no route can be made of the nodes that are there, or one only drains."""
        router.not_ready, router.is_expected = self.not_ready, lambda: not self._is_stuck

    @property
    def detail(self) -> str:
        """What is waited for, as it holds now."""
        absences = self._absences
        missed = absences.sentences() if self._is_stuck and self._router.serving is None else [absences.loss()]
        return "; ".join(filter(None, (*missed, self._said)))

    @property
    def _absences(self) -> Absences:
        return Absences(self._members.all(), self._lost, self._finishing)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._again_and_again, self._router.run)
            nursery.start_soon(self._again_and_again, self.drift.run)
            excuse = partial(excuse_the_paused, self._members, self._routes, self._router, self._housekeeping)
            nursery.start_soon(self._again_and_again, excuse)
            await self._again_and_again(self._next_step, nursery)

    def not_ready(self) -> NotReady:
        """With the numbers, and what is waited for."""
        return NotReady(
            "the model is not ready",
            self.detail or str(self._lost or ""),
            required=self.required,
            ready=self.ready_nodes(),
        )

    def ready_nodes(self) -> int:
        return ready_nodes(self.state, self._members.all())

    def rebalance(self) -> str:
        """Has a plan made of all nodes that are there: what becomes of it, in a sentence."""
        if self._router.serving is None:
            return f"there is no route to make better: {self.detail}"
        self._improvement.ask()
        self._members.notify()
        return "a plan is made of all nodes that are there; if it differs, it takes the place of the one that serves"

    def _drifted(self) -> None:
        self._improvement.reconsider()
        self._members.notify()

    async def _next_step(self, nursery: trio.Nursery) -> None:
        for broken in [service for service in self._router.services if service.route.failure is not None]:
            await broken.ended.wait()
        service, seen = self._router.serving, self._members.changes
        self.planning.requirements.tell(self._members.all())
        self._router.admit()  # members may have reported more room
        if service is None:
            await self._make(nursery)
        elif service.route.is_doubted and not await self._builder.is_proven_again(service.route):
            return
        elif pausing := [hop.member for hop in service.route.hops if hop.member.paused]:
            await self._serve_without(pausing[0], service, nursery)
        elif self._routes.all() != [service.route]:
            await self._pause(RETRY_SECONDS, seen)  # one that was replaced is still finishing
        elif (better := await self._improvement.find(service.route, self._trusted())) is not None:
            await self._take(better, service, nursery)
        else:
            self._housekeeping.tidy(service.route, self._members.all(), nursery)
            self._members.spare({one.node_id: AVOIDED for one in self._suspicion.suspects(self._members.available())})
            await self._pause(RETRY_SECONDS, seen)

    async def _make(self, nursery: trio.Nursery, plan: Plan | None = None) -> None:
        """A route where there is none: that of `plan`, or with as little to load as can be."""
        plan = plan or await self._next_plan()
        self._become(State.LOADING, "the nodes load their layers")
        try:
            route = await self._build(plan)
        except CoreError as error:
            _log.log(_level(error), "route %d ended: %s", self.epoch, error)
            self._lose(error)
            if isinstance(error, PluginError):
                self._is_stuck = True
                await trio.sleep(PLUGIN_RETRY_SECONDS)
            elif not isinstance(error, LoadRefused):
                self._failures += 1
                await trio.sleep(min(RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**self._failures))
        else:
            self._failures = 0
            self._open(route, plan, nursery)

    async def _serve_without(self, pausing: Member, service: RouteService, nursery: trio.Nursery) -> None:
        """The next route is made beside the one that serves, if memory allows; or after it; or there is none."""
        others = self._members.available()
        try:
            plan = await service.route.unless_broken(
                partial(self._suspicion.plan, self.planning, others, beside=self._routes.all())
            )
        except PlanError:
            if self._settings.recovery_time == 0 or not await self._can_be_served_without():
                await self._drain(service, pausing)
            elif pausing.paused:
                _log.info(NO_MEMORY_FOR_TWO)
                service.route.fail(parting(pausing))
            return
        if plan is not None:
            await self._replace(plan, service, nursery, lambda: pausing.paused != "")

    async def _replace(
        self, plan: Plan, service: RouteService, nursery: trio.Nursery, is_wanted: Callable[[], bool]
    ) -> None:
        """Makes the next route while the present one serves; then sessions move over."""
        if self._router.serving is not service:
            return  # it broke while the plan was made
        self._become(State.READY, f"the next route is loaded beside the one that serves: {describe(plan)}")
        route: Route | None = None
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._cancel_unless, is_wanted, watching.cancel_scope)
                route = await self._build(plan)
                watching.cancel_scope.cancel()
        except* CoreError as group:
            failure = group.exceptions[0]
            _log.log(_level(failure), "the next route could not be made: %s", failure)
        still_serves = self._router.serving is service
        if still_serves:
            self._become(State.READY, "")
        if route is None:
            self._improvement.rest()
            if still_serves:
                await self._pause(RETRY_SECONDS)
            return
        earlier = list(self._router.services)
        self._open(route, plan, nursery)
        for old in earlier:
            old.retire()

    async def _cancel_unless(self, is_wanted: Callable[[], bool], scope: trio.CancelScope) -> None:
        while True:
            seen = self._members.changes
            if not is_wanted():
                scope.cancel()
            await self._members.wait_change(seen)

    async def _take(self, better: Better, service: RouteService, nursery: trio.Nursery) -> None:
        """Has a better plan take the place of the route that serves."""
        if better.fits_beside:
            await self._replace(better.plan, service, nursery, lambda: True)
            return
        _log.info(NO_MEMORY_FOR_TWO)
        service.route.fail(Replaced("a better plan takes its place", "memory holds one of the two"))
        await service.ended.wait()
        await self._make(nursery, better.plan)

    async def _build(self, plan: Plan) -> Route:
        """Registers a route and has it loaded; whatever ends that ends the route."""
        members = {member.node_id: member for member in self._members.all()}
        hops = []
        for stage in plan.stages:
            if stage.node_id not in members:
                raise RouteError(f"node {stage.node_id!r} has left", "while the plan was made", node=stage.node_id)
            hops.append(self._new_hop(members[stage.node_id], range(stage.start, stage.end)))
        route = Route(next(self._epochs), hops)
        for hop in hops:
            self._housekeeping.make_way(hop)
        self._routes.add(route)
        if self._router.serving is None:
            self.epoch = route.epoch
            self.required = max(self._settings.min_nodes, len(route.members))
            self.left_out, self.notes = dict(plan.left_out), plan.notes
        _log.info("plan for route %d: %s", route.epoch, describe(plan))
        self._members.notify()
        try:
            await self._builder.build(route)
            if route.failure is not None:
                raise route.failure
        except BaseException as error:
            if isinstance(error, Exception) and all(hop.state is not HopState.LOADING for hop in hops):
                self._suspicion.note(route)
            self._end(route, RouteError("the route was not made"))
            if isinstance(error, CoreError) or not isinstance(error, Exception):
                raise
            _log.exception("the route could not be made")
            raise RouteError("the route could not be made", f"{type(error).__name__}: {error}") from error
        return route

    def _open(self, route: Route, plan: Plan, nursery: trio.Nursery) -> None:
        self._routes.wires.note_relayed(route)
        route.on_wrong_answer = partial(self._suspicion.wrong_answer, route)
        service = self._make_service(route)
        if route.epoch > 1:
            self._improvement.rest()
        self.epoch, self.required = route.epoch, max(self._settings.min_nodes, len(route.members))
        self.left_out, self.notes, self._lost = dict(plan.left_out), plan.notes, None
        self._members.spare(self.left_out)
        _log.info("route %d is ready: %s", route.epoch, describe(plan))
        self._become(State.READY, "")
        self._router.open(service)
        nursery.start_soon(self._serve, service)

    async def _serve(self, service: RouteService) -> None:
        route = service.route
        try:
            await service.serve()
        except Exception:
            _log.exception("the coordinator failed on route %d", route.epoch)
            for session in service.admission.running.values():
                if session.place is not None and session.place.in_flight:
                    session.fail(RouteError("the coordinator failed", "while it decoded this"))
        self._end(route, RouteError("the route has ended", "the coordinator failed on it"))
        assert route.failure is not None
        on_purpose = isinstance(route.failure, Replaced | Parting) and not service.admission.running
        self._suspicion.note(route)
        _log.log(logging.INFO if on_purpose else logging.WARNING, "route %d ended: %s", route.epoch, route.failure)
        if self._router.serving is None:
            self._lose(route.failure)
        self._router.close(service)

    def _lose(self, failure: CoreError) -> None:
        self._lost, self.required = failure, self._settings.min_nodes
        self._members.rest()
        self._become(State.WAITING, PLANNING)

    def _end(self, route: Route, failure: RouteError) -> None:
        """Its hops are told, and free what they cache."""
        route.fail(failure)
        self._routes.remove(route)
        for hop in route.hops:
            hop.member.order(Release(hop.number))
        if self._router.serving is not None:
            self._members.spare(self.left_out)
        self._members.notify()

    async def _next_plan(self) -> Plan:
        """Waits until the members that are there can hold the model, saying meanwhile what is missing."""
        patience = trio.current_time() + GATHER_SECONDS
        while True:
            available, seen = self._members.available(), self._members.changes
            self.planning.requirements.tell(self._members.all())
            try:
                plan = await self._suspicion.plan_anyway(self.planning, available, self._routes.all())
            except PlanError as error:
                self._is_stuck = True
                self._become(State.WAITING, self._absences.waited_for(error, self._settings.local_nodes))
                await self._pause(RETRY_SECONDS, seen)
                continue
            self._is_stuck = False
            if self.epoch == 0 and self.planning.is_partly_held(available) and trio.current_time() < patience:
                self._become(State.LOADING, "nodes come back that held layers before: others are waited for")
                await self._pause(patience - trio.current_time(), seen)
                continue
            return plan

    async def _drain(self, service: RouteService, pausing: Member) -> None:
        """While the route serves: until no generation runs on it, or the member resumes; no new one begins."""
        self._is_stuck, service.admission.is_open = True, False
        self._finishing = pausing if service.admission.running else None
        self._become(State.WAITING, "")

        async def goes_on() -> bool:
            others_can = self._settings.recovery_time > 0 and await self._can_be_served_without()
            return others_can or not pausing.paused

        await drain(service, self._members, goes_on)
        self._finishing = None
        if service.route.failure is not None:
            return
        if await goes_on():
            self._is_stuck, service.admission.is_open = False, True
            self._become(State.READY, "")
            self._router.admit()
        else:
            service.route.fail(parting(pausing))

    async def _can_be_served_without(self) -> bool:
        """Whether those that do not pause can hold the model."""
        try:
            await self.planning.plan(self._members.available(), in_haste=True)
        except PlanError:
            return False
        return True

    def _trusted(self) -> list[Member]:
        available = self._members.available()
        suspects = self._suspicion.suspects(available)
        return [member for member in available if member not in suspects]

    def _new_hop(self, member: Member, layers: range) -> Hop:
        precision, planned = self.planning.precision, self.planning.speeds.timed(member, layers)
        cost = self.planning.model.session_cost(layers, precision)
        return Hop(next(self._numbers), member, layers, precision, cost, planned_seconds=planned)

    def _become(self, state: State, said: str) -> None:
        self._routes.serves = state is State.READY
        self.state, self._said = state, said
        self._on_change()

    async def _pause(self, seconds: float, seen: int | None = None) -> None:
        """Until the members change again, from how many changes were `seen`, and for so many seconds at most."""
        with trio.move_on_after(seconds):
            await self._members.wait_change(self._members.changes if seen is None else seen)

    async def _again_and_again(self, step: Callable[..., Awaitable[None]], *args: object) -> None:
        """An unexpected error ends a step, a build or a route, and never the host."""
        while True:
            try:
                await step(*args)
            except Exception:
                _log.exception("the coordinator failed")
                await self._pause(RETRY_SECONDS)


def _level(failure: Exception) -> int:
    return logging.INFO if isinstance(failure, Parting) else logging.WARNING
