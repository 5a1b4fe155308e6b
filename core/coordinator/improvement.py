"""Whether another plan should take the place of the one that serves, and when that is looked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import trio

from core.coordinator.members import Member
from core.coordinator.planning import Planning, plan_of, same_stages
from core.coordinator.route import Route
from core.coordinator.router import Router
from core.coordinator.settings import CoordinatorSettings
from core.errors import PlanError
from core.interfaces.planner import Plan

REBALANCE_SECONDS = 60.0
"""Between two plans that take the place of one that serves, though nobody asked for them."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Better:
    """A plan that should take the place of the one that serves, and whether memory holds both meanwhile."""

    plan: Plan
    fits_beside: bool


class Improvement:
    """A better plan is looked for when other members are there than the last time, or they have become slower or
    faster, or when somebody asks for it."""

    def __init__(self, settings: CoordinatorSettings, planning: Planning, router: Router) -> None:
        self._settings = settings
        self._planning = planning
        self._router = router
        self._asked = False
        self._considered: Sequence[Member] = ()
        self._rests_until = 0.0

    def ask(self) -> None:
        """The next plan is made of all that are there, whatever it is predicted to bring."""
        self._asked = True

    def reconsider(self) -> None:
        """Machines have become slower or faster: another plan may be better now."""
        self._considered = ()

    def rest(self) -> None:
        """A plan was just put into effect, or came to nothing: the next is not looked for at once."""
        self._rests_until = trio.current_time() + REBALANCE_SECONDS

    async def find(self, route: Route, members: Sequence[Member]) -> Better | None:
        """A plan that is so much better than `route` that it should take its place, if it may be looked for now.

        None as soon as `route` breaks.
        """
        asked = self._asked
        if not asked and (not self._settings.rebalance or members == self._considered):
            return None
        if not asked and trio.current_time() < self._rests_until:
            return None
        self._considered, self._asked = members, False
        better = await route.unless_broken(partial(self._better, route, members, asked))
        if route.failure is not None:
            self._considered, self._asked = (), self._asked or asked
            return None
        return better

    async def _better(self, route: Route, members: Sequence[Member], asked: bool) -> Better | None:
        for beside in ([route], []):
            try:
                plan = await self._planning.plan(members, beside=beside)
            except PlanError:
                continue
            reason = "it was asked for" if asked else self._planning.gain(plan, route, members)
            if not reason or same_stages(plan, plan_of(route)):
                continue
            if not (beside or asked) and self._router.sessions:
                self._considered = ()  # what runs is not held up for it
                return None
            _log.info("a better plan than that of route %d: %s", route.epoch, reason)
            return Better(plan, bool(beside))
        return None
