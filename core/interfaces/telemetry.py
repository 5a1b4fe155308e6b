"""What the engine tells of itself while it runs: sessions, the route's hops, and counters. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Phase = Literal["waiting", "prefill", "decode", "suspended", "done", "failed"]


class Pace(Enum):
    AS_PLANNED = "as planned"
    SLOWER = "slower"
    FASTER = "faster"


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One generation at one moment. `prefilled` of its prompt's tokens have been sent through the route.

    `cached_tokens` of those were found in the nodes' caches; `tokens` are decoded, at `tokens_per_second` lately.
    `drafted` tokens were guessed ahead, of which `accepted` came true. `seconds` since it came. A `suspended` one
    waits for another route, since its own broke; `recoveries` counts how often it went on after that. `detail` says why
    it is suspended, or failed.
    """

    session: int
    phase: Phase
    route_epoch: int
    prompt_tokens: int
    cached_tokens: int
    prefilled: int
    tokens: int
    tokens_per_second: float
    drafted: int
    accepted: int
    seconds: float
    detail: str = ""
    recoveries: int = 0


@dataclass(frozen=True, slots=True)
class PaceStatus:
    """A machine that serves has become slower or faster than planned, or is as planned again, for two minutes by then.

    A token takes `token_seconds` in its layers, and was to take `planned_seconds`.
    """

    node_id: str
    pace: Pace
    token_seconds: float
    planned_seconds: float


@dataclass(frozen=True, slots=True)
class KVStatus:
    """The route's KV memory, in tokens: `reserved` by running sessions, `kept` of ended ones until others need it."""

    tokens: int = 0
    reserved: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class HopStatus:
    """A hop of the route that serves, with its layers, [start, end), and the bytes of their weights.

    The times are averages of late over its decode steps, in milliseconds: waiting for its turn, and computing.
    """

    node_id: str
    queue_ms: float
    compute_ms: float
    layers: tuple[int, int] = (0, 0)
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What happened to the cluster `at` that moment, in seconds since 1970, in words for its people."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Seconds that began `at`, since 1970: how many tokens were decoded, how many generations there were at once."""

    at: float
    tokens: int
    sessions: int


@dataclass(frozen=True, slots=True)
class History:
    """Speed and load, oldest first; each point is of `seconds`, and the last one is not over yet."""

    seconds: float
    points: tuple[HistoryPoint, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, or of a histogram its `buckets`: upper bounds with how many were at most that."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """Named and counted as Prometheus has it (prometheus.io/docs/practices/naming); a histogram's value is its sum."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]
