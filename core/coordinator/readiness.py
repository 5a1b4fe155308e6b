"""What stands between the cluster and being ready, and how many nodes are."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from core.coordinator.members import Member, MemberState


class State(Enum):
    """What stands between the cluster and being ready."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"


def ready_nodes(state: State, members: Iterable[Member]) -> int:
    """Nodes that could serve: those that have loaded, or before there is a plan, those that are there."""
    states = [member.state for member in members]
    if state is State.WAITING:
        return sum(each not in (MemberState.FAILED, MemberState.PAUSED) for each in states)
    return sum(each in (MemberState.LOADED, MemberState.READY) for each in states)
