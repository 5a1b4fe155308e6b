"""All routes that are alive or being made: whose messages go to which, and who hears that a member has gone."""

from __future__ import annotations

from collections.abc import Sequence

from core.coordinator.members import Member
from core.coordinator.route import Route
from core.coordinator.wires import Wires
from core.errors import ProtocolError
from core.protocol.codec import Packet
from core.protocol.fields import PeerLink
from core.protocol.messages import CacheCommand, HiddenState, InferenceError, PeerLost, Run


class Routes:
    """`serves`: whether sessions are let onto any of them. `wires` are between those who have ever been neighbours."""

    def __init__(self) -> None:
        self.serves = False
        self.wires = Wires()
        self._by_hop: dict[int, Route] = {}

    def all(self) -> list[Route]:
        """In the order in which they were begun."""
        return list(dict.fromkeys(self._by_hop.values()))

    def add(self, route: Route) -> None:
        """Its hops are their members' from now on: they do not hold layers for another route alone."""
        for other in self.all():
            other.is_settled = other.is_settled and not other.members & route.members
        for hop in route.hops:
            self._by_hop[hop.number] = route
            hop.member.add(hop)

    def remove(self, route: Route) -> None:
        for hop in route.hops:
            self._by_hop.pop(hop.number, None)
            hop.member.drop(hop)

    async def take(self, member: Member, packet: Packet) -> None:
        """A message for or from a hop; that of a route which has ended goes nowhere.

        Raises ProtocolError for one that isn't the member's to send.
        """
        message = packet.message
        if not isinstance(message, (Run, CacheCommand, HiddenState, InferenceError, PeerLost)):
            raise ProtocolError(f"node {member.node_id!r} sent a {message.TYPE}")
        route = self._by_hop.get(message.hop)
        if route is not None:
            await route.take(member, message.hop, packet)

    def note_links(self, member: Member, links: Sequence[PeerLink]) -> None:
        """What `member` says of the links that its hops have to the next ones."""
        for link in links:
            if (route := self._by_hop.get(link.hop)) is not None:
                self.wires.note_link(route, member, link)

    def member_left(self, member: Member) -> None:
        for route in self.all():
            route.member_left(member)
