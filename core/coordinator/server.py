"""The node server: who may join, and whose messages go where."""

from __future__ import annotations

import hmac
import logging

import core
from core.coordinator.enrolment import Enrolment
from core.coordinator.members import Member, Members
from core.coordinator.routes import Routes
from core.errors import ChannelClosed, ProtocolError, TrustError
from core.interfaces.transport import Channel
from core.link import Link, greeting, open_link
from core.protocol.codec import Packet
from core.protocol.fields import clipped
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Hello,
    HelloAck,
    Leave,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    Message,
    NodeState,
    Pause,
    PeerConnected,
)
from core.trust.addresses import host_of
from core.trust.register import KnownNode

_log = logging.getLogger(__name__)


class NodeServer:
    """`serve` is the transport's handler: one connection, one member, until it ends."""

    def __init__(
        self,
        members: Members,
        routes: Routes,
        enrolment: Enrolment,
        local_token: bytes | None = None,
        local_nodes: int = 0,
    ) -> None:
        """A node that shows `local_token` is one of `local_nodes`, which share this machine's memory."""
        self._members = members
        self._routes = routes
        self._enrolment = enrolment
        self._local_token = local_token
        self._local_nodes = local_nodes

    async def serve(self, channel: Channel) -> None:
        """Raises ProtocolError, TrustError or ChannelClosed, which the transport logs, for a peer that is no node, or
        may not join."""
        async with open_link(channel) as link:
            member = await self._welcomed(link)
            try:
                with member.scope:
                    await link.send(HelloAck(PROTOCOL_VERSION, core.__version__, member.node_id))
                    _log.info("node %s joined from %s with %s", member.node_id, link.peer, member.hello.selected_device)
                    self._members.add(member)
                    self._settle(member)
                    await self._listen(member)
            finally:
                await self._forget(member)
            if member.farewell is not None:
                await link.end_with(member.farewell)

    async def _welcomed(self, link: Link) -> Member:
        hello, nonce = await greeting(link)
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL_VERSION or not hello.node_id:
            refusal = _refusal(hello)
            await link.end_with(refusal)
            raise ProtocolError(f"{link.peer} was refused", refusal.message)
        try:
            credential = await self._enrolment.admit(link, hello, nonce)
        except TrustError as error:
            await link.end_with(Error(ErrorCode.NOT_A_MEMBER, clipped(error.message)))
            raise
        if credential is not None:
            await self._refuse_a_second(link, credential)
        link.settle()
        member = Member(hello, link, credential)
        shown, token = hello.local_token, self._local_token
        if shown is not None and token is not None and hmac.compare_digest(shown, token):
            member.is_local, member.shares_memory_with = True, max(1, self._local_nodes)
        return member

    async def _refuse_a_second(self, link: Link, credential: KnownNode) -> None:
        """Raises TrustError if the machine that `credential` is of is here, and answers: two have its key."""
        first = self._members.find(credential.node_id)
        if first is None or not await first.link.answers():
            return
        where = f"another machine with this one's key is connected, from {host_of(first.link.peer)}"
        await link.end_with(Error(ErrorCode.SAME_KEY, clipped(where)))
        raise TrustError(
            f"{link.peer} has the key of node {first.node_id!r}, which is connected from {first.link.peer}",
            "one's disk may be a copy of the other's",
            "have the copy move its identity.pem away, and let it in with an invite of its own",
        )

    async def _forget(self, member: Member) -> None:
        """Its machine is not connected any more, unless it came back by another connection."""
        credential = member.credential
        if credential is None:
            return
        connected = [other.credential.fingerprint for other in self._members.all() if other.credential]
        if credential.fingerprint not in connected:
            await self._enrolment.left(credential)

    async def _listen(self, member: Member) -> None:
        reason = ""
        try:
            while True:
                await self._take(member, await member.link.receive())
        except ChannelClosed as error:
            reason = error.reason
        except ProtocolError as error:
            reason = str(error)
            member.fail(reason)
            await member.link.end_with(Error(ErrorCode.PROTOCOL, clipped(reason)))
        except Exception as error:
            _log.exception("a message of node %s could not be taken", member.node_id)
            reason = f"the coordinator failed on one of its messages: {type(error).__name__}"
            member.fail(reason)
        finally:
            reason = reason or member.gone_because or "the coordinator ends"
            _log.info("node %s left: %s", member.node_id, reason)
            self._members.remove(member, reason)
            self._routes.member_left(member)

    def _settle(self, member: Member) -> None:
        if not member.paused and self._routes.serves:
            member.spare("the cluster serves without it; it is in the next plan")
            _log.info("node %s is spare: %s", member.node_id, member.detail)

    async def _take(self, member: Member, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, NodeState):
            member.count_news()
            changed = (message.kv_room, message.holdings) != (member.reported.kv_room, member.reported.holdings)
            member.reported = message
            self._routes.note_links(member, message.links)
            if changed:
                self._members.notify()
        elif isinstance(message, LoadProgress):
            member.show(message.phase, (message.done, message.total))
            member.post(message)
        elif isinstance(message, (LoadComplete, LoadFailed, PeerConnected)):
            member.post(message)
        elif isinstance(message, Pause):
            member.count_news()
            was_paused = member.excused
            member.pause(message.reason, leaves=message.leaves)
            said = f"pauses: {message.reason}" if message.reason else "serves again"
            self._members.journal.note(f"{member.node_id} {said}")
            if was_paused:
                self._settle(member)
            self._members.notify()
        elif isinstance(message, Leave):
            raise ChannelClosed("it left", message.reason)
        elif isinstance(message, Error):
            raise ChannelClosed("it ended the link", message.message)
        else:
            await self._routes.take(member, packet)


def _refusal(hello: Message) -> Error:
    if not isinstance(hello, Hello):
        return Error(ErrorCode.NOT_A_NODE, f"HELLO is expected first, not {hello.TYPE}")
    if hello.protocol == PROTOCOL_VERSION:
        return Error(ErrorCode.NOT_A_NODE, "a node says what it is called: without a name it would be the coordinator")
    return Error(
        "protocol_version",
        f"the coordinator speaks protocol {PROTOCOL_VERSION} (core {core.__version__}) and this node protocol"
        f" {hello.protocol} (core {hello.core_version or 'unknown'}): install the same version on both",
    )
