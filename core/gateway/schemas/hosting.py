"""What a host asks and decides: who may join, and what other machines would bring."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from core.gateway.schemas.decoding import Fields

MAX_INVITE_SECONDS = 365 * 86_400
MAX_MACHINES = 64
Name = Annotated[str, Meta(max_length=128)]
Memory = Annotated[int, Meta(ge=1, le=2**50)]


class InviteBody(Fields, kw_only=True):
    """`name` is what the machine will be called; empty: its own name."""

    seconds: Annotated[int, Meta(ge=60, le=MAX_INVITE_SECONDS)] = 86_400
    name: Name = ""


class Invited(Struct, kw_only=True):
    """`link` lets one machine in, once, until `expires` (seconds since 1970).

    `qr` is the link as a QR code: its rows, a character for each module, 1 if it is dark.
    """

    id: str
    link: str
    expires: int
    hosts: tuple[str, ...]
    port: int
    qr: list[str]


class DecisionBody(Fields, kw_only=True):
    """Whether the machine is let in that asks with this `code`."""

    code: Name
    decision: Literal["approve", "deny"]


class RevokeBody(Fields, kw_only=True):
    id: Name


class RemoveBody(Fields, kw_only=True):
    """A member, by its name, or by the key at the name's end."""

    name: Name


class Done(Struct):
    """`message` says what was done."""

    message: str


class WhatIfBody(Fields, kw_only=True):
    """Without those nodes, and with others that have so many bytes of free memory."""

    without: Annotated[tuple[Name, ...], Meta(max_length=MAX_MACHINES)] = ()
    memory_of_others: Annotated[tuple[Memory, ...], Meta(max_length=16)] = field(default_factory=tuple)
