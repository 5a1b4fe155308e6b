"""Sessions that wait for a place on a route: new ones, and those whose route ended under them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import trio

from core.coordinator.session import Session, Status
from core.errors import CoreError

MAX_WAITING = 256
"""New sessions that may wait at once."""


class WaitingQueue:
    """One for all routes, so that a session keeps its turn whichever route comes next."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self._arrivals = itertools.count(1)
        self._changed = trio.Event()

    @property
    def is_full(self) -> bool:
        return sum(session.status is Status.WAITING for session in self.sessions) >= MAX_WAITING

    def add(self, session: Session, deadline: float) -> None:
        """At `deadline`, by trio's clock, it has waited for too long."""
        session.arrival = session.arrival or next(self._arrivals)
        session.deadline = deadline
        self.sessions.append(session)
        self._changed.set()

    def remove(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)

    def wake(self) -> None:
        """Deadlines have changed."""
        self._changed.set()

    def postpone(self, deadline: float) -> None:
        """Sessions that have not run yet may wait until `deadline` at least: a route serves."""
        for session in self.sessions:
            if session.status is Status.WAITING:
                session.deadline, session.lost = max(session.deadline, deadline), None

    def next(self, running: Counter[str]) -> Session | None:
        """Whoever ran before, in the order in which they came; or else, of the clients of which the fewest sessions
        are `running`, the session that came first."""
        return min(
            self.sessions,
            key=lambda one: (not one.has_run, not one.has_run and running[one.client], one.arrival),
            default=None,
        )

    async def expire(self, too_late: Callable[[Session], CoreError]) -> None:
        """Fails, for ever, whoever has waited until its deadline."""
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            for session in [session for session in self.sessions if session.deadline <= now]:
                self.remove(session)
                session.fail(too_late(session), _ending(session))
            with trio.move_on_at(min((session.deadline for session in self.sessions), default=math.inf)):
                await self._changed.wait()


def _ending(session: Session) -> str:
    return "queue_timeout" if session.status is Status.WAITING else "failed"
