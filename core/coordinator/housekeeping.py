"""What nodes hold beside the layers that serve: nothing, or layers that stand in for those of another node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import trio

from core.coordinator.builder import RouteBuilder
from core.coordinator.hop import Hop, HopState
from core.coordinator.members import Member
from core.coordinator.planning import Planning
from core.coordinator.route import Route
from core.errors import CoreError
from core.protocol.fields import Holding, Span
from core.protocol.messages import KeepLayers, Release

MAX_STAND_INS = 8
"""Of one member."""
SETTLING_SECONDS = 30.0
"""For how long members are waited for that are to let go of layers: what they say then is the memory that there is."""
Extra = tuple[frozenset[int], bool]
"""Layers of the model that a member holds and that nobody needs, and whether it holds those of others."""
NOTHING: Extra = (frozenset(), False)
_log = logging.getLogger(__name__)


class Housekeeping:
    """`in_memory`: stand-ins hold layers in memory, and not their files alone. `new_hop` numbers what is asked for."""

    def __init__(
        self,
        planning: Planning,
        builder: RouteBuilder,
        new_hop: Callable[[Member, range], Hop],
        *,
        in_memory: bool,
    ) -> None:
        self._planning = planning
        self._builder = builder
        self._new_hop = new_hop
        self._in_memory = in_memory
        self._asked: dict[Member, Extra] = {}

    def tidy(self, route: Route, members: Sequence[Member], nursery: trio.Nursery) -> None:
        """`route` serves, and no other is alive or being made: members let go of what it does without."""
        spares = [member for member in members if self._may_stand_in(member)]
        wanted = self._stand_ins(route, spares) if self._in_memory or self._planning.from_hub else {}
        for member in members:
            if not member.paused:
                self._have_stand_in(member, wanted.get(member, []), nursery)
                self._have_let_go(member)
        now = trio.current_time()
        route.tidied_at = min(route.tidied_at, now)
        in_time = now < route.tidied_at + SETTLING_SECONDS
        route.is_settled = not in_time or all(self._extra(hop.member) == NOTHING for hop in route.hops)
        self._asked = {member: asked for member, asked in self._asked.items() if member in members}

    def dismiss(self, member: Member) -> None:
        """It takes no layers for now, and is to hold none."""
        self._release(member, member.stand_ins)
        member.order(KeepLayers([]))

    def make_way(self, hop: Hop) -> None:
        """A route needs `hop`: its member stops bringing other layers to stand in for somebody."""
        member = hop.member
        loading = [other for other in member.stand_ins if other.state is HopState.LOADING]
        self._release(member, [other for other in loading if other.layers != hop.layers])

    def _may_stand_in(self, member: Member) -> bool:
        rests = not member.hops and member.is_available
        return rests and not self._planning.requirements.lacking(member)

    def _stand_ins(self, route: Route, spares: Sequence[Member]) -> dict[Member, list[range]]:
        """For each spare the hops whose layers it stands in for: each hop once, as far as there is memory for it."""
        room = {member: self._planning.memory(member) for member in spares}
        chosen: dict[Member, list[range]] = {}
        for hop in sorted(route.hops, key=lambda hop: (-self._planning.layer_bytes(hop.layers), hop.layers.start)):
            need = self._planning.layer_bytes(hop.layers)
            able = [member for member in spares if room[member] >= need and len(chosen.get(member, ())) < MAX_STAND_INS]
            if able:
                # Whoever stands in for something already does so for more, so that the others stay free.
                taken = max(able, key=lambda member: (hop.layers in _ranges(member), room[member]))
                room[taken] -= need
                chosen.setdefault(taken, []).append(hop.layers)
        return chosen

    def _have_stand_in(self, member: Member, wanted: Sequence[range], nursery: trio.Nursery) -> None:
        self._release(member, [hop for hop in member.stand_ins if hop.layers not in wanted])
        for layers in wanted:
            if layers not in _ranges(member):
                hop = self._new_hop(member, layers)
                hop.stands_in = True
                member.stand_ins.append(hop)
                nursery.start_soon(self._prepare, hop)

    async def _prepare(self, hop: Hop) -> None:
        """What failed is not asked for again while the same is wanted: a route would say why."""
        try:
            await self._builder.stand_in(hop, in_memory=self._in_memory)
        except CoreError as error:
            _log.info("%s does not stand in for layers %s: %s", hop.member.node_id, hop.span, error)
        except Exception:
            _log.exception("%s does not stand in for layers %s", hop.member.node_id, hop.span)
        else:
            _log.info("%s stands in for layers %s", hop.member.node_id, hop.span)

    def _have_let_go(self, member: Member) -> None:
        """Of layers that it holds, and neither its hops nor its stand-ins need."""
        extra = self._extra(member)
        if extra != self._asked.get(member, NOTHING):
            self._asked[member] = extra
            if extra != NOTHING:
                member.order(KeepLayers(self._holding(hop.layers for hop in self._standing(member))))

    def _extra(self, member: Member) -> Extra:
        needed = frozenset(layer for hop in (*member.hops, *self._standing(member)) for layer in hop.layers)
        return self._planning.held(member) - needed, member.holds_others(self._planning.held_as)

    def _standing(self, member: Member) -> Sequence[Hop]:
        """The stand-ins that it holds in memory."""
        return member.stand_ins if self._in_memory else ()

    def _holding(self, ranges: Iterable[range]) -> list[Holding]:
        held_as = self._planning.held_as
        spans = [Span(layers.start, layers.stop) for layers in ranges]
        return [Holding(held_as.manifest, held_as.quant, held_as.dtype, spans)] if spans else []

    def _release(self, member: Member, stand_ins: Sequence[Hop]) -> None:
        for hop in list(stand_ins):
            member.stand_ins.remove(hop)
            hop.close()
            member.order(Release(hop.number))


def _ranges(member: Member) -> list[range]:
    return [hop.layers for hop in member.stand_ins]
