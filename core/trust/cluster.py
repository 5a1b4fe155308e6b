"""A node's side of membership: the cluster that it belongs to, or is about to join."""

from __future__ import annotations

import logging

import msgspec

from core.errors import ConfigError
from core.trust.link import InviteLink
from core.trust.state_dir import StateDir

_MEMBER_OF = "cluster.json"
_JOINING = "joining.json"
_log = logging.getLogger(__name__)


class Cluster(msgspec.Struct, frozen=True):
    """Where a coordinator is, each host to be tried in turn, and the SHA-256 of its certificate.

    `secret` is that of an invite which was not used yet; "" for a member.
    """

    hosts: tuple[str, ...]
    port: int
    fingerprint: bytes
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"Cluster(hosts={self.hosts}, port={self.port})"


def join(link: str, state: StateDir) -> Cluster:
    """What an invite leads to, remembered until the coordinator has answered. Raises ConfigError for a damaged link."""
    invite = InviteLink.parse(link)
    cluster = Cluster(invite.hosts, invite.port, invite.fingerprint, invite.secret)
    state.write(_JOINING, msgspec.json.encode(cluster))
    return cluster


def remembered(state: StateDir) -> Cluster | None:
    """The cluster that was joined last, though its coordinator may not have answered yet; None for none."""
    return _read(state, _JOINING) or _read(state, _MEMBER_OF)


def welcomed(cluster: Cluster, state: StateDir) -> Cluster:
    """The coordinator knows this machine's key now: the secret has done its work."""
    member = msgspec.structs.replace(cluster, secret=b"")
    if _read(state, _MEMBER_OF) != member:
        state.write(_MEMBER_OF, msgspec.json.encode(member))
    state.remove(_JOINING)
    return member


def refused(state: StateDir) -> None:
    """The invite does not hold; what this machine was a member of before, it still is."""
    state.remove(_JOINING)


def leave(state: StateDir) -> None:
    """Forgets every cluster. The key stays."""
    state.remove(_JOINING)
    state.remove(_MEMBER_OF)


def _read(state: StateDir, name: str) -> Cluster | None:
    data = state.read(name)
    try:
        return msgspec.json.decode(data, type=Cluster) if data is not None else None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{state.path / name} does not read", str(error), "remove it, and join with a new invite"
        ) from None
