"""Requests to join: machines without an invite that ask to join, until the host approves or denies them."""

from __future__ import annotations

import hmac
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from core.errors import ChannelClosed, TrustError, sole_error
from core.link import Link, first_message
from core.port_limits import neighbourhood
from core.protocol.messages import Asking, Hello, Reveal
from core.trust.addresses import host_of
from core.trust.asking import ASK_SECONDS, code, commitment
from core.trust.identity import Identity
from core.trust.proof import new_nonce
from core.trust.register import Asker, KnownNode, Register

MAX_WAITING = 8
MAX_PER_ADDRESS = 2
MAX_BEGUN = 30
MAX_BEGUN_PER_ADDRESS = 5
"""In the time that a host has to answer: so many codes are few against a million."""
WATCH_SECONDS = 0.25
_LATER = "try again in a few minutes, or ask the host for an invite"
_log = logging.getLogger(__name__)


class JoinRequests:
    def __init__(self, identity: Identity, register: Register) -> None:
        self._identity = identity
        self._register = register
        self._waiting: Counter[str] = Counter()
        self._begun: deque[tuple[float, str]] = deque(maxlen=MAX_BEGUN)

    async def wait(self, link: Link, hello: Hello, fingerprint: bytes) -> KnownNode:
        """The member that `hello`'s machine became, whose certificate has this fingerprint.

        Raises TrustError where there is no room, or the host denied it or did not answer; ChannelClosed where the
        machine left.
        """
        with self._place(neighbourhood(host_of(link.peer))):
            asker = Asker(
                code=await self._agree(link, hello, fingerprint),
                name=hello.node_id,
                fingerprint=fingerprint.hex(),
                host=host_of(link.peer),
                expires=int(time.time() + ASK_SECONDS),
            )
            asker = await trio.to_thread.run_sync(self._register.ask, asker)
            _log.warning(
                "%s at %s asks to join: if it shows %s too, approve it with core members --approve %s",
                asker.name,
                asker.host,
                asker.code,
                asker.code,
            )
            try:
                await self._until_approved(link, asker)
                return await trio.to_thread.run_sync(self._register.admit, asker.fingerprint, None, asker.name)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._register.withdraw, asker)

    @contextmanager
    def _place(self, host: str) -> Iterator[None]:
        now = trio.current_time()
        while self._begun and self._begun[0][0] <= now - ASK_SECONDS:
            self._begun.popleft()
        begun_there = sum(there == host for _, there in self._begun)
        if self._waiting.total() >= MAX_WAITING or len(self._begun) >= MAX_BEGUN:
            raise TrustError("no room", f"too many machines ask to join: {_LATER}")
        if self._waiting[host] >= MAX_PER_ADDRESS or begun_there >= MAX_BEGUN_PER_ADDRESS:
            raise TrustError("no room", f"this machine's address asked too often: {_LATER}")
        self._begun.append((now, host))
        self._waiting[host] += 1
        try:
            yield
        finally:
            self._waiting[host] -= 1
            self._waiting += Counter()

    async def _agree(self, link: Link, hello: Hello, fingerprint: bytes) -> str:
        nonce = new_nonce()
        await link.send(Asking(nonce))
        reveal = await first_message(link)
        if not isinstance(reveal, Reveal) or not hmac.compare_digest(commitment(reveal.nonce), hello.asks or b""):
            raise TrustError("no code", "what this machine revealed is not what it committed to")
        return code(self._identity.fingerprint, fingerprint, nonce, reveal.nonce)

    async def _until_approved(self, link: Link, asker: Asker) -> None:
        approved: bool | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_be_there, link)
                with trio.move_on_after(ASK_SECONDS):
                    approved = await self._answer(asker)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None
        if approved is None:
            raise TrustError("not a member", f"the host did not answer within {ASK_SECONDS / 60:g} minutes: ask again")
        if not approved:
            raise TrustError("not a member", "the host does not let this machine in")

    async def _answer(self, asker: Asker) -> bool:
        seen = None
        while True:
            version = self._register.version()
            if version != seen:
                seen = version
                approved = await trio.to_thread.run_sync(self._register.answer_to, asker)
                if approved is not None:
                    return approved
            await trio.sleep(WATCH_SECONDS)


async def _be_there(link: Link) -> None:
    """Answers heartbeats. Raises ChannelClosed where the machine goes, or says anything before it was answered."""
    packet = await link.receive()
    raise ChannelClosed(f"{link.peer} does not ask any more", f"it sent a {packet.message.TYPE}")
