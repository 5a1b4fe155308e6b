"""Members that pause or are about to leave: they are let go once nobody is served by them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

from core.coordinator.housekeeping import Housekeeping
from core.coordinator.members import Member, Members
from core.coordinator.router import Router
from core.coordinator.routes import Routes
from core.coordinator.service import Parting, RouteService

DRAIN_SECONDS = 30.0
"""What a node that pauses gives the generations that run on it."""


async def excuse_the_paused(members: Members, routes: Routes, router: Router, housekeeping: Housekeeping) -> None:
    """Has those rest that pause, for ever: when they have no hop, or their patience is at its end.

    A route that is only being made ends at once when one of its members pauses.
    """
    since: dict[Member, float] = {}
    while True:
        seen, now = members.changes, trio.current_time()
        pausing = [member for member in members.all() if member.paused and not member.excused]
        since = {member: since.get(member, now) for member in pausing}
        serving = [service.route for service in router.services]
        for member in pausing:
            too_long = now >= since[member] + DRAIN_SECONDS
            for route in routes.all():
                if route.hop_of(member) is not None and (too_long or route not in serving):
                    route.fail(parting(member))
            if not member.hops:
                member.excuse()
                housekeeping.dismiss(member)
                members.notify()
        ends = (begun + DRAIN_SECONDS for begun in since.values())
        with trio.move_on_at(min((end for end in ends if end > now), default=math.inf)):
            await members.wait_change(seen)


async def drain(service: RouteService, members: Members, goes_on: Callable[[], Awaitable[bool]]) -> None:
    """Waits until nobody runs on `service`, its route breaks, or it `goes_on`; for 30 s at most."""
    with trio.move_on_after(DRAIN_SECONDS):
        async with trio.open_nursery() as nursery:
            for end in (service.wait_empty, service.route.broken.wait):
                nursery.start_soon(_first, end, nursery.cancel_scope)
            seen = members.changes
            while not await goes_on():
                await members.wait_change(seen)
                seen = members.changes
            nursery.cancel_scope.cancel()


async def _first(end: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await end()
    scope.cancel()


def parting(member: Member) -> Parting:
    """The end of a route of which `member` is, for the reason that it gave."""
    return Parting(f"node {member.node_id!r} {member.absence}", member.paused, node=member.node_id)
