"""Which route a session is on: it waits for one, moves from one to the next, and goes on when its route has broken."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from core.coordinator.service import Parting, Replaced, RouteService
from core.coordinator.session import Session
from core.coordinator.telemetry import Telemetry
from core.coordinator.waiting_queue import MAX_WAITING, WaitingQueue
from core.errors import CoreError, NotReady, Overloaded, RouteError

WAIT_SECONDS = 120.0
"""For how long a session waits to be let onto a route that serves."""
MAX_LOST_ROUTES = 3
"""A session under which so many routes have broken may be what breaks them."""


class Router:
    """Keeps the services of all live routes. Sessions of one that broke wait `recovery_time` seconds for the next.

    `not_ready` says why nobody can be served, `is_expected` whether a route is being made.
    """

    def __init__(self, recovery_time: float, telemetry: Telemetry) -> None:
        self.queue = WaitingQueue()
        self.services: list[RouteService] = []
        """Of routes that are alive, the newest first."""
        self.not_ready: Callable[[], NotReady] = lambda: NotReady("the model is not ready", required=1, ready=0)
        self.is_expected: Callable[[], bool] = lambda: False
        self._recovery_time = recovery_time
        self._telemetry = telemetry

    @property
    def serving(self) -> RouteService | None:
        """The newest that lets sessions in."""
        alive = (service for service in self.services if service.route.failure is None)
        return next((service for service in alive if service.admission.is_open), None)

    @property
    def sessions(self) -> list[Session]:
        """Those that run or wait, in the order in which they came."""
        running = [session for service in self.services for session in service.admission.running.values()]
        return sorted((*running, *self.queue.sessions), key=lambda session: session.arrival)

    @property
    def crowd(self) -> str:
        running = sum(len(service.admission.running) for service in self.services)
        return f"{running} running and {len(self.queue.sessions)} waiting"

    async def run(self) -> None:
        """Fails who waits for too long; until cancelled."""
        await self.queue.expire(self._too_late)

    @asynccontextmanager
    async def running(self, session: Session, ending: Callable[[], str]) -> AsyncIterator[None]:
        """The session runs in the block, which begins when it is let onto a route; afterwards nothing of it is left.

        `ending` says how it ended if not by itself. Raises NotReady, Overloaded, or whatever ends its wait.
        """
        try:
            await self._enter(session)
            yield
        finally:
            self._leave(session, ending())

    def refuse_unless_expected(self) -> None:
        """Raises NotReady if there is no route, and none that a session could wait for."""
        if self.serving is None and not (self._recovery_time > 0 and self.is_expected()):
            raise self.not_ready()

    def open(self, service: RouteService) -> None:
        """Sessions are let onto its route."""
        self.services.insert(0, service)
        self.queue.postpone(trio.current_time() + WAIT_SECONDS)
        self.admit()

    def close(self, service: RouteService) -> None:
        """Its route has ended: whoever was on it waits for another."""
        self.services.remove(service)
        failure = service.route.failure
        service.admission.is_open = False
        for session in list(service.admission.running.values()):
            self._suspend(session, failure)
        service.admission.running.clear()
        service.ended.set()
        if self.serving is None:
            self._nobody_serves(failure)
        self.admit()

    def admit(self) -> None:
        """Lets in whoever is next, on the newest route that has room."""
        for service in self.services:
            service.admission.admit()

    def move(self, session: Session) -> None:
        """A session of a route that is retired, of which nothing is in flight, goes on elsewhere."""
        service = self._service_of(session)
        assert service is not None, "its route is alive"
        service.admission.move_out(session)
        session.suspend()
        self._requeue(session, math.inf)
        self.admit()

    def end_all(self, failure: RouteError) -> None:
        """The coordinator ends: nobody is let in from now on."""
        self.is_expected = lambda: False
        sessions = self.sessions
        self.queue.sessions.clear()
        for service in self.services:
            service.admission.is_open = False
        for session in sessions:
            session.fail(failure.again())

    async def _enter(self, session: Session) -> None:
        self._telemetry.came(session)
        if self.queue.is_full:
            full = Overloaded(f"{MAX_WAITING} requests are waiting", "no more are taken at once", "try again shortly")
            session.fail(full, "queue_full")
            raise full
        self.refuse_unless_expected()
        patience = WAIT_SECONDS if self.serving is not None else self._recovery_time
        self.queue.add(session, trio.current_time() + patience)
        self.admit()
        await session.admitted.wait()
        if session.failure is not None:
            raise session.failure

    def _leave(self, session: Session, ending: str) -> None:
        session.leave(ending)
        self._telemetry.left(session)
        self.queue.remove(session)
        service = self._service_of(session)
        if service is not None:
            service.scheduler.release(session)
            service.scheduler.wake()
        else:
            self.admit()

    def _service_of(self, session: Session) -> RouteService | None:
        place = session.place
        if place is None:
            return None
        return next((service for service in self.services if service.route.epoch == place.epoch), None)

    def _suspend(self, session: Session, failure: RouteError | None) -> None:
        place = session.place
        if session.is_over:
            session.vacate()
            return
        broke = failure is not None and not isinstance(failure, Parting | Replaced)
        session.lost_routes += broke and place is not None and place.in_flight > 0
        session.suspend(failure)
        if session.lost_routes >= MAX_LOST_ROUTES and failure is not None:
            session.fail(_dangerous(session, failure))
        else:
            self._requeue(session, self._patience(failure))

    def _requeue(self, session: Session, patience: float) -> None:
        self.queue.add(session, trio.current_time() + patience)
        self._telemetry.tell(session)

    def _patience(self, failure: RouteError | None) -> float:
        """Seconds for which a session whose route ended so waits for another."""
        return max(self._recovery_time, WAIT_SECONDS) if isinstance(failure, Replaced) else self._recovery_time

    def _nobody_serves(self, failure: RouteError | None) -> None:
        """Whoever waits does so for a route to be made, and no longer than those that were on the last one."""
        latest = trio.current_time() + self._patience(failure)
        for session in self.queue.sessions:
            session.deadline = min(session.deadline, latest)
            session.lost = session.lost or failure
        self.queue.wake()

    def _too_late(self, session: Session) -> CoreError:
        if session.lost is not None:
            return session.lost.again()
        if self.serving is None:
            return self.not_ready()
        return Overloaded(f"no room within {WAIT_SECONDS:g} s", f"beside {self.crowd}", "try again later")


def _dangerous(session: Session, failure: RouteError) -> RouteError:
    return RouteError(
        f"{session.lost_routes} routes have broken under this request",
        f"it may be what breaks them, so it is not tried on another; the last one: {failure}",
        "change it before you send it again, or look into the nodes' logs",
        node=failure.node,
        layers=failure.layers,
    )
