"""A node's side of membership: the cluster that this machine belongs to, or is about to join."""

from __future__ import annotations

import msgspec

from core.errors import ConfigError
from core.interfaces.transport import DEFAULT_TRANSPORT
from core.trust.identity import FILE as KEY_FILE
from core.trust.identity import Identity
from core.trust.link import InviteLink
from core.trust.state_dir import StateDir

_MEMBER_OF = "cluster.json"
_JOINING = "joining.json"


class Cluster(msgspec.Struct, frozen=True):
    """Where a coordinator is, each host to be tried in turn by `transport`, and the SHA-256 of its certificate.

    `secret` is that of an invite which was not used yet; None for a member. `asks`: the host is to be asked.
    """

    hosts: tuple[str, ...]
    port: int
    fingerprint: bytes
    secret: bytes | None = None
    asks: bool = False
    transport: str = DEFAULT_TRANSPORT

    def __repr__(self) -> str:
        return f"Cluster(hosts={self.hosts}, port={self.port})"


class Membership:
    """A machine's key, and the cluster that it is good for. `join`, `ask` or `remembered` makes one."""

    def __init__(self, state: StateDir, cluster: Cluster) -> None:
        self.cluster = cluster
        self.identity = Identity.open(state)
        self.key_file = state.path / KEY_FILE
        self._state = state

    @classmethod
    def join(cls, link: str, state: StateDir) -> Membership:
        """By an invite, which is remembered until the coordinator has answered.

        Raises ConfigError for a damaged link, and for a state directory that can't be used.
        """
        invite = InviteLink.parse(link)
        cluster = Cluster(invite.hosts, invite.port, invite.fingerprint, invite.secret, transport=invite.transport)
        state.write(_JOINING, msgspec.json.encode(cluster))
        return cls(state, cluster)

    @classmethod
    def ask(cls, cluster: Cluster, state: StateDir) -> Membership:
        """Without an invite, by the host's approval; remembered as an invite is."""
        asked = msgspec.structs.replace(cluster, secret=None, asks=True)
        state.write(_JOINING, msgspec.json.encode(asked))
        return cls(state, asked)

    @classmethod
    def remembered(cls, state: StateDir) -> Membership | None:
        """The one of the last invite or request, though its coordinator may not have answered yet; None for none."""
        cluster = _read(state, _JOINING) or _read(state, _MEMBER_OF)
        return cls(state, cluster) if cluster else None

    def at(self, host: str | None, port: int | None) -> None:
        """The coordinator is to be looked for here, whatever the invite said; None for what that said."""
        hosts = (host,) if host is not None else self.cluster.hosts
        self.cluster = msgspec.structs.replace(self.cluster, hosts=hosts, port=port or self.cluster.port)

    def welcomed(self) -> None:
        """The coordinator knows this machine's key now: the secret has done its work."""
        member = msgspec.structs.replace(self.cluster, secret=None, asks=False)
        if _read(self._state, _MEMBER_OF) != member:
            self._state.write(_MEMBER_OF, msgspec.json.encode(member))
        self._state.remove(_JOINING)
        self.cluster = member

    def refused(self) -> None:
        """It was not let in; what this machine was a member of before, it still is."""
        self._state.remove(_JOINING)

    def leave(self) -> None:
        """Forgets every cluster. The key stays."""
        self._state.remove(_JOINING)
        self._state.remove(_MEMBER_OF)


def _read(state: StateDir, name: str) -> Cluster | None:
    data = state.read(name)
    try:
        return msgspec.json.decode(data, type=Cluster) if data is not None else None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{state.path / name} does not read", str(error), "remove it, and join with a new invite"
        ) from None
