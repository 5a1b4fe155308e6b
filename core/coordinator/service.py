"""The service of one route: who is let onto it, the budget of its KV memory, and the scheduler that batches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from core.coordinator.admission import Admission
from core.coordinator.chunk_sizing import ChunkSizing
from core.coordinator.head import Head
from core.coordinator.route import Route
from core.coordinator.scheduler import Scheduler
from core.coordinator.session import Session
from core.coordinator.settings import CoordinatorSettings
from core.coordinator.telemetry import Telemetry
from core.coordinator.waiting_queue import WaitingQueue
from core.errors import RouteError
from core.runtime.compute import ComputeThread
from core.runtime.cuts import Cuts

NEARLY_DONE = 32
"""Tokens: a session that can decode no more than this is finished where it is."""
RETIRED_SECONDS = 30.0
"""For how long at most: its caches are in the way of the next plan."""


class Replaced(RouteError):
    """Another route has taken this one's place."""


class Parting(RouteError):
    """A node paused or left, and was let go."""


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the services of all routes of one model share. `cuts` as in Admission."""

    head: Head
    compute: ComputeThread
    telemetry: Telemetry
    queue: WaitingQueue
    settings: CoordinatorSettings
    cuts: Cuts


class RouteService:
    """Serves sessions on `route`. `on_room` is called when one has left, `on_idle` gets one that is to move on."""

    def __init__(
        self, route: Route, shared: ServiceParts, on_room: Callable[[], None], on_idle: Callable[[Session], None]
    ) -> None:
        settings = shared.settings
        self.route = route
        self.admission = Admission(
            route,
            shared.queue,
            self._begin,
            self._left,
            max_sessions=settings.max_sessions,
            answer_tokens=settings.answer_tokens,
            keeps=settings.prefix_cache,
            shares=settings.share_prefixes,
            cuts=shared.cuts,
        )
        sizing = ChunkSizing(settings.min_chunk, settings.max_chunk)
        self.scheduler = Scheduler(
            route, shared.head, shared.compute, self.admission, sizing, shared.telemetry, on_idle
        )
        self._telemetry = shared.telemetry
        self._on_room = on_room
        self.ended = trio.Event()
        """Set when nobody is on the route."""
        self._retired = trio.Event()
        self._empty = trio.Event()
        route.count_kv(lambda: self.admission.budget.rooms)

    async def serve(self) -> None:
        """Until the route breaks, or nobody is left on one that is retired."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_retired)
            await self.scheduler.run()
            nursery.cancel_scope.cancel()

    def retire(self) -> None:
        """Another route takes its place: sessions move there, or finish here if they are nearly done."""
        self.admission.close()
        for session in list(self.admission.running.values()):
            left = session.decoding.max_tokens - session.decoded
            goes_on = session.decodes and not session.is_ahead and not self.admission.is_starved(session)
            stays = goes_on and left <= NEARLY_DONE
            if session.place is not None and not stays:
                session.place.moving = True
                self.scheduler.release(session)
        self.scheduler.wake()
        self._retired.set()
        self._left()

    async def _end_when_retired(self) -> None:
        """Who can't finish in time, for want of a reader perhaps, goes on elsewhere."""
        await self._retired.wait()
        await trio.sleep(RETIRED_SECONDS)
        self._end()

    async def wait_empty(self) -> None:
        """Until nobody is on it."""
        while self.admission.running:
            self._empty = trio.Event()
            await self._empty.wait()

    def _begin(self, session: Session) -> None:
        self._telemetry.let_in(session)
        self.scheduler.begin(session)

    def _left(self) -> None:
        if not self.admission.running:
            self._empty.set()
            if self._retired.is_set():
                self._end()
        self._on_room()

    def _end(self) -> None:
        self.route.fail(Replaced("another route has taken this one's place"))
