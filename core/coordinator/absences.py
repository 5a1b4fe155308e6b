"""Why there is no route, in sentences that hold now: one for each node that is missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.coordinator.members import Member
from core.errors import CoreError, PlanError, RouteError


@dataclass(frozen=True, slots=True)
class Absences:
    """`members` are those that are there, `lost` is why the last route ended if none was made since, and what runs on
    `finishing` ends before it goes."""

    members: Sequence[Member]
    lost: CoreError | None
    finishing: Member | None = None

    def loss(self) -> str:
        """Why the last route ended; "" if the node by which it did is back, or its absence says it better."""
        if self.lost is None:
            return ""
        node = self.lost.node if isinstance(self.lost, RouteError) else ""
        there = next((member for member in self.members if member.node_id == node), None)
        return "" if there is not None and (there.paused or not there.failed_lately) else str(self.lost)

    def sentences(self) -> list[str]:
        """The loss, and who is there and takes no layers."""
        loss = self.loss()
        told = self.lost.node if loss and isinstance(self.lost, RouteError) else ""
        others = [member for member in self._away() if member.node_id != told]
        return [*([loss] if loss else []), *map(self._sentence, others)]

    def waited_for(self, error: PlanError, local_nodes: int) -> str:
        """What `error` says, of which this machine is to have so many nodes of its own."""
        starting = local_nodes - sum(member.is_local for member in self.members)
        title = error.title
        if 0 < error.missing_nodes <= starting:
            title = "a node of this machine starts" if starting == 1 else f"{starting} nodes of this machine start"
        elif 0 < error.missing_nodes <= sum(not member.leaves for member in self._away()):
            title = f"{title}, or come back"
        return str(PlanError(title, error.message, error.hint))

    def _away(self) -> list[Member]:
        return [member for member in self.members if not member.is_available]

    def _sentence(self, member: Member) -> str:
        if member is self.finishing:
            parts = "leaves" if member.leaves else "pauses"
            return f"node {member.node_id!r} {parts}, what runs is finished first: {member.paused}"
        if member.paused:
            return f"node {member.node_id!r} {member.absence}: {member.paused}"
        reason = member.failure.reason if member.failure is not None else ""
        return f"node {member.node_id!r} is left out for a while: {reason}"
