"""Whether machines have become slower or faster than they were when the plan was made, for long enough to count."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from core.coordinator.excess import Excess
from core.coordinator.hop import Hop
from core.coordinator.members import Member, Members
from core.coordinator.planning import Planning
from core.coordinator.prediction import MIN_SAVING_SECONDS
from core.coordinator.router import Router
from core.interfaces.telemetry import Pace, PaceStatus

DRIFT, BACK = 1.3, 1.15
"""By which factor what was planned must be missed to count, and within which one it is met again."""
HOLD_SECONDS = 120.0
CHECK_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Drift:
    """Of what was `planned` to take so many seconds. Its pace changes once another has held for HOLD_SECONDS."""

    def __init__(self, planned: float) -> None:
        self.planned = planned
        self.pace = Pace.AS_PLANNED
        self.ratio = 1.0
        self._next, self._since = Pace.AS_PLANNED, 0.0

    def note(self, seconds: float, now: float) -> bool:
        """It takes so long, at this moment. Whether that changes its pace."""
        self.ratio = seconds / self.planned
        pace = self._pace_of(seconds)
        if pace is not self._next:
            self._next, self._since = pace, now
        if pace is self.pace or now - self._since < HOLD_SECONDS:
            return False
        self.pace = pace
        return True

    def _pace_of(self, seconds: float) -> Pace:
        if abs(seconds - self.planned) < MIN_SAVING_SECONDS:
            return Pace.AS_PLANNED
        factor = DRIFT if self.pace is Pace.AS_PLANNED else BACK
        if seconds >= factor * self.planned:
            return Pace.SLOWER
        return Pace.FASTER if factor * seconds <= self.planned else Pace.AS_PLANNED


class DriftWatch:
    """`run` it in a task. `tell` is called for a hop whose pace is another one, `on_drift` when another plan may be
    better for that.
    """

    def __init__(
        self,
        members: Members,
        router: Router,
        planning: Planning,
        tell: Callable[[PaceStatus], None],
        on_drift: Callable[[], None],
    ) -> None:
        self._members = members
        self._router = router
        self._planning = planning
        self._tell = tell
        self._on_drift = on_drift
        self._drifts: dict[Hop | Member, Drift] = {}
        self._excess = Excess(planning.speeds)

    async def run(self) -> None:
        while True:
            await trio.sleep(CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Of members that serve, the layers which they serve are looked at, of the others all."""
        now, route = trio.current_time(), self._router.serving.route if self._router.serving else None
        hops = route.hops if route else ()
        serving = {hop.member: hop for hop in hops}
        subjects = [serving.get(member, member) for member in self._members.all()]
        self._drifts = {subject: drift for subject in subjects if (drift := self._drift_of(subject)) is not None}
        drifted = [subject for subject, drift in self._drifts.items() if drift.note(self._seconds(subject), now)]
        for subject in drifted:
            if isinstance(subject, Hop):
                self._note_pace(subject, self._drifts[subject])
        corrected = self._excess.forgive(self._members.all(), now)
        if route and (taken := self._planning.times.token):
            corrected |= self._excess.note(hops, taken, self._planning.token_seconds(hops), now)
        if drifted or corrected:
            self._on_drift()

    def slowness(self, member: Member) -> str:
        """How much slower the member is than planned, in a sentence; empty if it is not."""
        for hop in member.hops:
            drift = self._drifts.get(hop)
            if drift is not None and drift.pace is Pace.SLOWER:
                return f"it computes {drift.ratio - 1:.0%} slower than planned: is another program busy there?"
        return ""

    def _drift_of(self, subject: Hop | Member) -> Drift | None:
        """None while it has not timed its layers."""
        seconds = self._seconds(subject)
        if not seconds:
            return None
        planned = subject.planned_seconds if isinstance(subject, Hop) else 0.0
        return self._drifts.get(subject) or Drift(planned or seconds)

    def _seconds(self, subject: Hop | Member) -> float:
        speeds = self._planning.speeds
        if isinstance(subject, Hop):
            return speeds.timed(subject.member, subject.layers)
        return speeds.timed(subject, range(len(speeds.costs)))

    def _note_pace(self, hop: Hop, drift: Drift) -> None:
        status = PaceStatus(hop.member.node_id, drift.pace, drift.planned * drift.ratio, drift.planned)
        told = (status.node_id, status.pace.value, hop.span, 1000 * status.token_seconds, 1000 * status.planned_seconds)
        level = logging.WARNING if drift.pace is Pace.SLOWER else logging.INFO
        _log.log(level, "node %s is %s with layers %s: a token takes %.3g ms there, %.3g were planned", *told)
        self._tell(status)
