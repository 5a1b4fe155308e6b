"""Members that routes are better made without for a while: routes broke or ended under them again and again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

import trio

from core.coordinator.members import Member
from core.coordinator.planning import Planning
from core.coordinator.route import Route
from core.coordinator.service import Parting, Replaced
from core.errors import PlanError, WrongAnswer
from core.interfaces.planner import Plan

AVOIDED = "routes ended under it again and again: for ten minutes the cluster does without it if it can"
SUSPECT_SECONDS = 600.0
"""For how long the end of a route is held against its members."""
UNEXPLAINED, WENT, SUSPECT = 3, 2, 6
"""Points for each member of a route that broke, nobody knows why; for a member that ended one by going, or by a pause;
and so many make a suspect. A single break is nobody's fault, and whoever restarts twice is none to be avoided."""
_MAX_WRONG = 256
_log = logging.getLogger(__name__)


class Suspicion:
    """A liar is in each route that it breaks, and the honest are not: so of all members it soon has the most."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, frozenset[str], int]] = []
        self._wrong = deque[tuple[float, str]](maxlen=_MAX_WRONG)
        """When a node answered what can't be, and which."""

    def note(self, route: Route) -> None:
        """It ended: because members went or paused, because another took its place, or because it broke."""
        members = [hop.member for hop in route.hops]
        went = frozenset(member.node_id for member in members if member.gone_because or member.paused)
        if not went and isinstance(route.failure, Replaced | Parting):
            return
        nodes, points = (went, WENT) if went else (frozenset(member.node_id for member in members), UNEXPLAINED)
        now = trio.current_time()
        recent = [end for end in self._ended if now - end[0] < SUSPECT_SECONDS]
        self._ended = [*recent, (now, nodes, points)]

    def wrong_answer(self, route: Route, error: WrongAnswer) -> None:
        """Once it may be a bit that flipped; twice in ten minutes ends the route, and leaves its node out."""
        after = trio.current_time() - SUSPECT_SECONDS
        repeated = any(node_id == error.node for at, node_id in self._wrong if at > after)
        self._wrong.append((trio.current_time(), error.node))
        _log.warning("%s", error)
        for hop in route.hops:
            if repeated and hop.member.node_id == error.node:
                hop.member.fail(f"it answered what can't be, twice in ten minutes: {error}")
                route.fail(hop.failed(f"node {error.node!r} answered what can't be, twice in ten minutes", str(error)))

    def suspects(self, members: Sequence[Member]) -> list[Member]:
        """Those with the most points first."""
        after = trio.current_time() - SUSPECT_SECONDS
        recent = [(nodes, points) for at, nodes, points in self._ended if at > after]
        total = {one: sum(points for nodes, points in recent if one.node_id in nodes) for one in members}
        suspect = [member for member in members if total[member] >= SUSPECT]
        return sorted(suspect, key=lambda member: -total[member])

    async def plan(self, planning: Planning, members: Sequence[Member], beside: Collection[Route] = ()) -> Plan:
        """A plan in haste, without as many of the suspects as can be done without. Raises PlanError."""
        suspects = self.suspects(members)
        for count in range(len(suspects), 0, -1):
            try:
                trusted = [one for one in members if one not in suspects[:count]]
                return await planning.plan(trusted, beside=beside, in_haste=True)
            except PlanError:
                continue
        return await planning.plan(members, beside=beside, in_haste=True)

    async def plan_anyway(self, planning: Planning, members: Sequence[Member], alive: Collection[Route]) -> Plan:
        """The same beside what still finishes on the `alive` routes, or else without regard to it."""
        if alive:
            with suppress(PlanError):
                return await self.plan(planning, members, beside=alive)
        return await self.plan(planning, members)
