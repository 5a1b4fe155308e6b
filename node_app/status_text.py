"""From what a node does to what the app shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from node_app.status import State, Status

if TYPE_CHECKING:
    from core.node.state import Activity

_SPARE = "the cluster serves without this machine; it is in the next plan"
_HOST_IS_OFF = "the host is off or out of reach, this machine keeps trying"
_STATES = {
    "connecting": State.CONNECTING,
    "unreachable": State.CONNECTING,
    "asking": State.CONNECTING,
    "waiting": State.WAITING,
    "spare": State.WAITING,
    "loading": State.LOADING,
    "ready": State.READY,
    "error": State.ERROR,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the app knows besides the node's activity. `refusal`, `pause` and `failure` are reasons, "" for none."""

    cluster: str = ""
    refusal: str = ""
    pause: str = ""
    failure: str = ""
    tokens_today: int = 0
    tokens_per_second: float = 0.0


def status_of(activity: Activity | None, facts: Facts) -> Status:
    """`activity` is None while no node runs."""
    state, reason = _state(activity, facts)
    holds = activity is not None and activity.layers is not None
    loaded = activity is not None and activity.state == "ready"
    return Status(
        state=state,
        cluster=facts.cluster,
        model=_name(activity.model) if activity and holds else "",
        layers=activity.layers if activity else None,
        memory=activity.weight_bytes + activity.kv_bytes if activity and loaded else 0,
        tokens_today=facts.tokens_today,
        tokens_per_second=facts.tokens_per_second,
        progress=activity.progress if activity else None,
        reason=reason,
        code=activity.code if activity and state is State.CONNECTING else "",
    )


def _name(model: str) -> str:
    """A repo's id, or what a file or directory is called."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def _state(activity: Activity | None, facts: Facts) -> tuple[State, str]:
    if facts.failure:
        return State.ERROR, facts.failure
    if not facts.cluster:
        return State.NOT_JOINED, facts.refusal
    if facts.pause:
        serving = activity is not None and activity.layers is not None
        return State.PAUSED, f"{facts.pause}, what runs is finished first" if serving else facts.pause
    if activity is None:
        return State.CONNECTING, "starting"
    if activity.state == "loading" and activity.progress and activity.detail == "download":
        return State.DOWNLOADING, ""
    if activity.state == "loading":
        return State.LOADING, ""
    if activity.state == "ready":
        return State.BUSY if facts.tokens_per_second else State.READY, ""
    said = {"spare": _SPARE, "unreachable": _HOST_IS_OFF}
    return _STATES[activity.state], said.get(activity.state, activity.detail)
