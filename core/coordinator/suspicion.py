"""Who may be at fault where nobody can tell: the members under which routes break again and again."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from core.coordinator.members import Member
from core.coordinator.planning import Planning
from core.coordinator.route import Route
from core.errors import PlanError
from core.interfaces.planner import Plan

SUSPECT_SECONDS = 600.0
"""For how long a route that broke is held against its members."""
SUSPECT_ROUTES = 2
"""A single break is nobody's fault: whoever was under so many is suspect."""


class Suspicion:
    """A liar is in each route that it breaks, and the honest are not: so of all members it soon has the most."""

    def __init__(self) -> None:
        self._broken: list[tuple[float, frozenset[str]]] = []

    def note(self, route: Route) -> None:
        """It broke, and none of its members has gone, which would explain it."""
        if any(hop.member.gone_because for hop in route.hops):
            return
        now = trio.current_time()
        recent = [(at, nodes) for at, nodes in self._broken if now - at < SUSPECT_SECONDS]
        self._broken = [*recent, (now, frozenset(hop.member.node_id for hop in route.hops))]

    def suspects(self, members: Sequence[Member]) -> list[Member]:
        """Those under which most routes broke first."""
        after = trio.current_time() - SUSPECT_SECONDS
        breaks = {one: sum(at > after and one.node_id in nodes for at, nodes in self._broken) for one in members}
        suspect = [member for member in members if breaks[member] >= SUSPECT_ROUTES]
        return sorted(suspect, key=lambda member: -breaks[member])

    async def plan(self, planning: Planning, members: Sequence[Member]) -> Plan:
        """A plan in haste, without as many of the suspects as can be done without. Raises PlanError."""
        suspects = self.suspects(members)
        for count in range(len(suspects), 0, -1):
            try:
                return await planning.plan([one for one in members if one not in suspects[:count]], in_haste=True)
            except PlanError:
                continue
        return await planning.plan(members, in_haste=True)
