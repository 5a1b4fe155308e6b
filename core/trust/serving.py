"""What a coordinator tells the commands beside it: where its nodes join, and that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from core.errors import ConfigError
from core.interfaces.transport import DEFAULT_TRANSPORT
from core.trust.addresses import reachable
from core.trust.state_dir import StateDir

DEFAULT_PORT = 7001
ANY_IPV4 = "0.0.0.0"
_FILE = "serving.json"
_LOCK = "serving.lock"
_PATIENCE_SECONDS = 1.0
"""Longer than `is_serving` holds the lock."""


class Serving(msgspec.Struct, frozen=True):
    """`hosts` are those that were asked for; none stands for whatever addresses this machine has of the kind that it
    `listens_on`: 0.0.0.0 for IPv4, :: for IPv6."""

    port: int = DEFAULT_PORT
    hosts: tuple[str, ...] = ()
    transport: str = DEFAULT_TRANSPORT
    listens_on: str = ANY_IPV4

    def reachable_hosts(self) -> tuple[str, ...]:
        """What to write into an invite. Raises ConfigError where others can't reach this machine."""
        hosts = self.hosts or tuple(reachable(self.listens_on))
        if not hosts:
            raise ConfigError(
                "this machine has no address that others could reach", "", "connect it, or serve with --advertise HOST"
            )
        return hosts


@contextmanager
def sole_coordinator(state: StateDir) -> Iterator[None]:
    """For the time that it serves. Raises ConfigError where another one serves with this state directory."""
    with state.lock(_LOCK, _PATIENCE_SECONDS, "end the core serve that runs with it, or give each a --state-dir"):
        yield


def announce(serving: Serving, state: StateDir) -> None:
    state.write(_FILE, msgspec.json.encode(serving))


def last_serving(state: StateDir) -> Serving | None:
    """What the present coordinator, or the last one, announced; None where there was none."""
    data = state.read(_FILE)
    try:
        return msgspec.json.decode(data, type=Serving) if data is not None else None
    except (ValueError, msgspec.ValidationError):
        return None


def is_serving(state: StateDir) -> bool:
    try:
        with state.lock(_LOCK, seconds=0):
            return False
    except ConfigError:
        return True
