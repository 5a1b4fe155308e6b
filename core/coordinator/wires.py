"""What was measured of the network: between members and the coordinator, and between neighbours of routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from core.coordinator.hop import DIRECT
from core.coordinator.members import Member
from core.coordinator.route import Route
from core.interfaces.planner import COORDINATOR, Wire
from core.link import Link
from core.protocol.fields import PeerLink

Ends = tuple[str, str]
MAX_PAIRS = 1024
MAX_WIRE_SECONDS = 60.0
MESSAGE_SECONDS = 0.0005
"""What a message costs more than a heartbeat does: at both ends a stage's weights have gone through the caches."""


class Wires:
    """Those between members are kept by their ids, the newest last. A node tells of its own links alone."""

    def __init__(self) -> None:
        self._between: dict[Ends, Wire | None] = {}
        """None: the coordinator has to relay what passes between them."""

    def note(self, one: str, other: str, wire: Wire | None) -> None:
        ends = min(one, other), max(one, other)
        self._between.pop(ends, None)
        self._between[ends] = wire
        if len(self._between) > MAX_PAIRS:
            del self._between[next(iter(self._between))]

    def note_link(self, route: Route, member: Member, link: PeerLink) -> None:
        """What `member`, a hop of `route`, says of its link to the next hop."""
        for hop, following in pairwise(route.hops):
            if hop.number == link.hop and hop.member is member:
                wire = _wire(link.round_trip_us / 1e6, link.bandwidth)
                self.note(member.node_id, following.member.node_id, wire)

    def note_relayed(self, route: Route) -> None:
        """`route` is linked: where that took a relay, it will another time."""
        for hop, following in pairwise(route.hops):
            if following.link != DIRECT:
                self.note(hop.member.node_id, following.member.node_id, None)

    def known(self, members: Sequence[Member]) -> dict[Ends, Wire]:
        """Those of `members`, by the ids of their ends."""
        ids = {member.node_id for member in members}
        found = {(COORDINATOR, member.node_id): wire for member in members if (wire := wire_of(member.link))}
        for (one, other), wire in self._between.items():
            if one in ids and other in ids:
                relayed = _joined(found.get((COORDINATOR, one)), found.get((COORDINATOR, other)))
                if (between := wire or relayed) is not None:
                    found[one, other] = between
        here = {COORDINATOR, *(member.node_id for member in members if member.link.within_this_machine)}
        return {ends: replace(wire, within_machine=here.issuperset(ends)) for ends, wire in found.items()}


def wire_of(link: Link) -> Wire | None:
    """None before the first few heartbeats."""
    round_trip = link.typical_round_trip
    return _wire(round_trip, link.bandwidth) if round_trip is not None else None


def _wire(round_trip: float, bandwidth: float) -> Wire:
    return Wire(min(round_trip / 2, MAX_WIRE_SECONDS) + MESSAGE_SECONDS, bandwidth)


def _joined(one: Wire | None, other: Wire | None) -> Wire | None:
    """Both, one after the other."""
    if one is None or other is None:
        return None
    slowness = sum(1 / wire.bandwidth for wire in (one, other) if wire.bandwidth)
    return Wire(one.seconds + other.seconds, 1 / slowness if slowness else 0.0)
