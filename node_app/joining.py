"""What a user pastes to join, and where it leads: an invite, or a plain host:port of a cluster on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from core.trust.link import PREFIX, InviteLink


@dataclass(frozen=True, slots=True)
class Target:
    """`host` and `port` of a coordinator."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def target_of(text: str) -> Target:
    """Raises ConfigError, in words for whoever pasted it."""
    text = text.strip()
    if text.startswith(PREFIX):
        InviteLink.parse(text)
        raise ConfigError("invites can't be used yet", "", "join by host:port")
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("that is no invite", f"an invite begins with {PREFIX}", "paste the whole link")
    return Target(host, int(port))
