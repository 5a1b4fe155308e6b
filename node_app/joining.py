"""How a user joins, and where that leads: an invite, a cluster that was found, or host:port on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from core.trust.addresses import is_this_machine
from core.trust.cluster import Cluster, Membership
from core.trust.identity import short_id
from core.trust.link import PREFIX, InviteLink
from core.trust.state_dir import StateDir


@dataclass(frozen=True, slots=True)
class Target:
    """Where a coordinator is. `invited`: the state directory remembers how, by an invite or by asking."""

    host: str
    port: int
    invited: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


SCHEME = "core:"
"""What a browser opens this app with."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A link that was opened, by whomever: nothing comes of it before its user says so. `key` tells clusters apart."""

    link: str
    host: str
    key: str

    @classmethod
    def of(cls, link: str) -> Offer:
        """Raises ConfigError for what is no invite."""
        invite = InviteLink.parse(link)
        return cls(link.strip(), str(Target(invite.hosts[0], invite.port)), short_id(invite.fingerprint))


def accept(text: str, state: StateDir) -> Target:
    """Remembers an invite in `state`. Raises ConfigError, in words for whoever pasted it."""
    text = text.strip()
    if text.startswith(PREFIX):
        return _target(Membership.join(text, state))
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or not is_this_machine(host):
        raise ConfigError("that is no invite", f"an invite begins with {PREFIX}", "paste the whole link")
    return Target(host, int(port))


def ask(cluster: Cluster, state: StateDir) -> Target:
    """Remembers in `state` that this cluster's host is to be asked."""
    return _target(Membership.ask(cluster, state))


def remembered(state: StateDir) -> Target | None:
    """Where the invite leads that was accepted last, for who has lost the settings; None for none that reads."""
    try:
        found = Membership.remembered(state)
    except ConfigError:
        return None
    return _target(found) if found else None


def membership(state: StateDir) -> Membership:
    """That of the invite which was accepted last. Raises ConfigError where it is lost."""
    found = Membership.remembered(state)
    if found is None:
        raise ConfigError(
            "this machine has forgotten its invite", str(state.path), "ask its host again, or join with a new one"
        )
    return found


def _target(membership: Membership) -> Target:
    cluster = membership.cluster
    return Target(cluster.hosts[0], cluster.port, invited=True)


def forget(state: StateDir) -> None:
    if (found := Membership.remembered(state)) is not None:
        found.leave()
