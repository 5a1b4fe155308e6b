"""How many connections a listener takes: in all, per address, half open, and per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import trio

from core.port_limits import NODES_SHARE, connections_within, neighbourhood

_MAX_ADDRESSES = 4096
"""That are remembered for their rate."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Half open is a connection whose peer has not proven yet who it is. Loopback is bounded in all alone.

    Of IPv6 an address is a network of 64 bits: whoever has one of its addresses has them all.
    """

    connections: int = 256
    half_open: int = 64
    per_address: int = 32
    half_open_per_address: int = 8
    burst: int = 32
    """Connections that an address may begin at once."""
    per_second: float = 4.0
    """By which it may begin more."""

    def within_open_files(self) -> Limits:
        """No more in all than leaves the process files for other things; of those, some for who is known."""
        most = connections_within(NODES_SHARE, self.connections)
        return replace(self, connections=most, half_open=min(self.half_open, max(1, most // 2)))


class Seats:
    def __init__(self, limits: Limits, now: Callable[[], float] = trio.current_time) -> None:
        self._limits = limits
        self._now = now
        self._open: Counter[str] = Counter()
        self._half_open: Counter[str] = Counter()
        self._rates: dict[str, _Bucket] = {}

    @contextmanager
    def seat(self, host: str) -> Iterator[Callable[[], None]]:
        """A place for one connection from `host`; what it yields is called when its peer has proven who it is.

        Raises Full, which says why, where there is none.
        """
        place = neighbourhood(host)
        if reason := self._full_for(place):
            raise Full(reason)
        self._open[place] += 1
        self._half_open[place] += 1
        proven = False

        def settle() -> None:
            nonlocal proven
            if not proven:
                proven = True
                _less(self._half_open, place)

        try:
            yield settle
        finally:
            settle()
            _less(self._open, place)

    def _full_for(self, place: str) -> str:
        limits = self._limits
        if self._open.total() >= limits.connections:
            return f"{limits.connections} are open already"
        if not place:
            return ""
        if self._half_open.total() >= limits.half_open:
            return f"{limits.half_open} are half open already"
        if self._open[place] >= limits.per_address:
            return f"{limits.per_address} from there are open already"
        if self._half_open[place] >= limits.half_open_per_address:
            return f"{limits.half_open_per_address} from there are half open already"
        return "" if self._bucket(place).take(self._now()) else "too many came from there in a short time"

    def _bucket(self, place: str) -> _Bucket:
        if place not in self._rates:
            if len(self._rates) >= _MAX_ADDRESSES:
                del self._rates[next(iter(self._rates))]
            self._rates[place] = _Bucket(self._limits.burst, self._limits.per_second, self._now())
        return self._rates[place]


class Full(Exception):
    """There is no seat for this connection now."""


class RateLimitedLog:
    """Lets through one of many: a log must not be filled by whoever is refused."""

    def __init__(self, seconds: float, now: Callable[[], float] = trio.current_time) -> None:
        self._seconds = seconds
        self._now = now
        self._next = -math.inf

    def __call__(self) -> bool:
        if self._now() < self._next:
            return False
        self._next = self._now() + self._seconds
        return True


@dataclass(slots=True)
class _Bucket:
    """A token bucket: full at first, and filled again by and by."""

    burst: int
    per_second: float
    since: float
    tokens: float = -1.0

    def __post_init__(self) -> None:
        self.tokens = float(self.burst)

    def take(self, now: float) -> bool:
        self.tokens = min(self.burst, self.tokens + (now - self.since) * self.per_second)
        self.since = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


def _less(counter: Counter[str], place: str) -> None:
    counter[place] -= 1
    if not counter[place]:
        del counter[place]
