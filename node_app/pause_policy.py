"""Whether this machine should serve just now: a pure function of limits, measurements, the time, and what it said last.

A pause costs the cluster a new plan and this machine its layers. So what others use is a mean over a minute, and a
pause for it lasts until they have been quiet for five.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from node_app.settings import Limits

QUIET = timedelta(minutes=5)
"""How long the machine must have been free of another's use before it serves again."""
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Measurements:
    """`cpu` and `gpu`: what other programs use, in percent of the whole (None where nobody can tell).

    `free_memory` in bytes, and `held` what of the rest this node holds. `battery`: the machine runs on it.
    """

    battery: bool = False
    cpu: float | None = None
    gpu: float | None = None
    free_memory: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Serve, where there is no `reason`, or pause for it: at least until `until`, where that is set.

    A reason stays the same while a pause lasts, and has no measured figure: the cluster is told of each that is new.
    `gave_back` bytes were this node's when it paused for want of memory: it would take them again. `although` others
    use the machine it serves, until they stop: its user said so.
    """

    reason: str = ""
    until: datetime | None = None
    gave_back: int = 0
    although: bool = False


SERVE = Verdict()
SERVE_ALTHOUGH_USED = Verdict(although=True)


def decide(limits: Limits, measured: Measurements, now: datetime, last: Verdict = SERVE) -> Verdict:
    for reason in _standing(limits, measured, now):
        return Verdict(reason)
    if _short_of_memory(limits, measured, last):
        gave_back = max(last.gave_back, measured.held)
        return Verdict(_memory_reason(limits, gave_back), now + QUIET, gave_back)
    for reason in _in_use(limits, measured):
        if last.although:
            return last
        return Verdict(reason if last.until is None else last.reason, now + QUIET, last.gave_back)
    if last.until is not None and now < last.until:
        return last
    return SERVE


def _standing(limits: Limits, measured: Measurements, now: datetime) -> Iterator[str]:
    if limits.hours is not None and not limits.hours.include(now.time()):
        yield f"outside its hours, {limits.hours.start} to {limits.hours.end}"
    if limits.pause_on_battery and measured.battery:
        yield "this machine runs on battery"


def _in_use(limits: Limits, measured: Measurements) -> Iterator[str]:
    for name, used, limit in (("CPU", measured.cpu, limits.cpu_percent), ("GPU", measured.gpu, limits.gpu_percent)):
        if limit is not None and used is not None and used > limit:
            minutes = QUIET // timedelta(minutes=1)
            yield f"other programs use the {name} (over {limit}%); back after {minutes} quiet minutes"


def _short_of_memory(limits: Limits, measured: Measurements, last: Verdict) -> bool:
    return measured.free_memory < _floor(limits) + last.gave_back


def _memory_reason(limits: Limits, gave_back: int) -> str:
    return f"other programs need the memory; back when {(_floor(limits) + gave_back) / _GB:.1f} GB are free"


def _floor(limits: Limits) -> float:
    return (limits.free_memory_gb or 0) * _GB
