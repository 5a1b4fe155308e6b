"""How many connections a listener takes: in all, per address, half open, and per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address

import trio

_MAX_ADDRESSES = 4096
"""That are remembered for their rate."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Half open is a connection whose peer has not proven yet who it is. Loopback is bounded in all alone."""

    connections: int = 256
    half_open: int = 64
    per_address: int = 32
    half_open_per_address: int = 8
    burst: int = 32
    """Connections that an address may begin at once."""
    per_second: float = 4.0
    """By which it may begin more."""


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
        if reason := self._full_for(host):
            raise Full(reason)
        self._open[host] += 1
        self._half_open[host] += 1
        proven = False

        def settle() -> None:
            nonlocal proven
            if not proven:
                proven = True
                _less(self._half_open, host)

        try:
            yield settle
        finally:
            settle()
            _less(self._open, host)

    def _full_for(self, host: str) -> str:
        limits = self._limits
        if self._open.total() >= limits.connections:
            return f"{limits.connections} are open already"
        if ip_address(host.partition("%")[0]).is_loopback:
            return ""
        if self._half_open.total() >= limits.half_open:
            return f"{limits.half_open} are half open already"
        if self._open[host] >= limits.per_address:
            return f"{limits.per_address} from there are open already"
        if self._half_open[host] >= limits.half_open_per_address:
            return f"{limits.half_open_per_address} from there are half open already"
        return "" if self._bucket(host).take(self._now()) else "too many came from there in a short time"

    def _bucket(self, host: str) -> _Bucket:
        if host not in self._rates:
            if len(self._rates) >= _MAX_ADDRESSES:
                del self._rates[next(iter(self._rates))]
            self._rates[host] = _Bucket(self._limits.burst, self._limits.per_second, self._now())
        return self._rates[host]


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


def _less(counter: Counter[str], host: str) -> None:
    counter[host] -= 1
    if not counter[host]:
        del counter[host]
