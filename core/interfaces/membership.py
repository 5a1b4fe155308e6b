"""Who may be part of a cluster, as its host sees and decides it. Plain data; all of it is called in trio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

InviteState = Literal["open", "used", "revoked", "expired"]


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """A machine that was let in. Times are in seconds since 1970; `tokens` have passed its layers since the start."""

    node_id: str
    connected: bool
    first_seen: int
    last_seen: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AskerEntry:
    """A machine that asks to be let in until `expires`: only if its owner reads out the same `code`."""

    code: str
    name: str
    host: str
    expires: int


@dataclass(frozen=True, slots=True)
class InviteEntry:
    """`name` is what the machine will be called, "" for its own name; `used_by` is who came with it."""

    id: str
    state: InviteState
    created: int
    expires: int
    name: str
    used_by: str


@dataclass(frozen=True, slots=True)
class MembershipStatus:
    """`closed` says why nobody can join from elsewhere; "" if machines can."""

    closed: str
    members: tuple[MemberEntry, ...] = ()
    asking: tuple[AskerEntry, ...] = ()
    invites: tuple[InviteEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class NewInvite:
    """`link` lets one machine in, once; it leads to the `hosts`, and its secret is kept nowhere."""

    id: str
    link: str
    expires: int
    hosts: tuple[str, ...]
    port: int


class Membership(Protocol):
    """Each raises ConfigError where nobody can join from elsewhere, and for what is not there."""

    async def status(self) -> MembershipStatus: ...

    async def invite(self, seconds: int, name: str) -> NewInvite: ...

    async def revoke(self, id: str) -> str:
        """Makes an open invite useless; gives its id."""

    async def approve(self, code: str) -> str:
        """Lets in the machine that shows `code`; gives its name."""

    async def deny(self, code: str) -> str: ...

    async def remove(self, name: str) -> str: ...
