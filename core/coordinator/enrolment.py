"""Enrolment: who is let in. On loopback everybody; from elsewhere, encrypted, members, and
those who bring an invite or whom the host approves."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from core.coordinator.join_requests import JoinRequests
from core.coordinator.members import Members
from core.errors import ConfigError, TrustError
from core.interfaces.transport import Credentials
from core.link import Link
from core.protocol.messages import Error, ErrorCode, Hello
from core.trust.addresses import is_loopback
from core.trust.identity import Identity
from core.trust.proof import verified
from core.trust.register import KnownNode, Register
from core.trust.serving import Serving, announce, sole_coordinator
from core.trust.state_dir import StateDir

WATCH_SECONDS = 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a coordinator has that can be reached beyond loopback, and None where it can't."""

    identity: Identity | None = None
    register: Register | None = None
    state: StateDir | None = None
    join_requests: JoinRequests | None = None

    @property
    def credentials(self) -> Credentials | None:
        return self.identity.credentials() if self.identity else None

    async def announce(self, serving: Serving) -> None:
        if self.state is not None:
            await trio.to_thread.run_sync(announce, serving, self.state)

    async def admit(self, link: Link, hello: Hello, nonce: bytes) -> KnownNode | None:
        """The member that `hello` comes from; None on loopback, where nobody is asked.

        Where the host is to be asked this takes minutes. Raises TrustError, or ChannelClosed.
        """
        if not link.secure or self.identity is None or self.register is None:
            return None
        certificate, proof = hello.certificate, hello.signature
        fingerprint = await trio.to_thread.run_sync(
            verified, "node", certificate, proof, nonce, self.identity.fingerprint
        )
        try:
            return await trio.to_thread.run_sync(self.register.admit, fingerprint.hex(), hello.invite, hello.node_id)
        except TrustError:
            if hello.asks is None or self.join_requests is None:
                raise
        return await self.join_requests.wait(link, hello, fingerprint)

    async def left(self, node: KnownNode) -> None:
        if self.register is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.register.left, node.fingerprint)

    async def watch(self, members: Members) -> None:
        """Turns out whoever is taken off the register."""
        if self.register is None:
            return
        seen = self.register.version()
        while True:
            await trio.sleep(WATCH_SECONDS)
            version = self.register.version()
            if version != seen:
                seen = version
                members.register_changes += 1
                await self._turn_out(self.register, members)

    async def _turn_out(self, register: Register, members: Members) -> None:
        try:
            allowed = await trio.to_thread.run_sync(register.members)
        except ConfigError as error:
            _log.warning("%s", error)
            return
        for member in members.all():
            if member.credential and bytes.fromhex(member.credential.fingerprint) not in allowed:
                member.dismiss(Error(ErrorCode.REMOVED, "the host removed this machine from the cluster"))


@asynccontextmanager
async def open_enrolment(node_host: str, state_dir: Path | None) -> AsyncIterator[Enrolment]:
    """The enrolment of a coordinator whose nodes join at `node_host`.

    Raises ConfigError for a state directory that can't be used, or that another coordinator uses.
    """
    if is_loopback(node_host):
        yield Enrolment()
        return
    state = await trio.to_thread.run_sync(StateDir.open, state_dir)
    with sole_coordinator(state):
        register = Register(state)
        identity = await trio.to_thread.run_sync(Identity.open, state)
        await trio.to_thread.run_sync(register.nobody_is_connected)
        yield Enrolment(identity, register, state, JoinRequests(identity, register))
