"""The node server: who may join, and whose messages go where."""

from __future__ import annotations

import logging
from typing import Protocol

import core
from core.coordinator.door import Door
from core.coordinator.members import Member, Members
from core.errors import ChannelClosed, ProtocolError, TrustError
from core.interfaces.transport import Channel
from core.link import Link, greeting, open_link
from core.protocol.codec import Packet
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Error,
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
    clipped,
)

_log = logging.getLogger(__name__)


class RouteTraffic(Protocol):
    """Takes what members say about the route, and hears of their coming and going."""

    async def take(self, member: Member, packet: Packet) -> None: ...

    def member_joined(self, member: Member) -> None: ...

    def member_left(self, member: Member) -> None: ...


class NodeServer:
    """`serve` is the transport's handler: one connection, one member, until it ends."""

    def __init__(self, members: Members, traffic: RouteTraffic, door: Door) -> None:
        self._members = members
        self._traffic = traffic
        self._door = door

    async def serve(self, channel: Channel) -> None:
        """Raises ProtocolError, TrustError or ChannelClosed, which the transport logs, for a peer that is no node, or
        may not join."""
        async with open_link(channel) as link:
            member = await self._welcomed(link)
            try:
                with member.scope:
                    await link.send(HelloAck(PROTOCOL_VERSION, core.__version__, member.node_id))
                    _log.info("node %s joined from %s with %s", member.node_id, link.peer, member.hello.selected_device)
                    self._settle(member)
                    self._members.add(member)
                    await self._listen(member)
            finally:
                await self._forget(member)
            if member.farewell is not None:
                await link.end_with(member.farewell)

    async def _welcomed(self, link: Link) -> Member:
        hello, nonce = await greeting(link)
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL_VERSION:
            refusal = _refusal(hello)
            await link.end_with(refusal)
            raise ProtocolError(f"{link.peer} was refused", refusal.message)
        try:
            credential = await self._door.admit(link, hello, nonce)
        except TrustError as error:
            await link.end_with(Error("not_a_member", clipped(error.message)))
            raise
        link.settle()
        return Member(hello, link, credential)

    async def _forget(self, member: Member) -> None:
        """Its machine is not connected any more, unless it came back by another connection."""
        credential = member.credential
        if credential is None:
            return
        connected = [other.credential.fingerprint for other in self._members.all() if other.credential]
        if credential.fingerprint not in connected:
            await self._door.left(credential)

    async def _listen(self, member: Member) -> None:
        reason = ""
        try:
            while True:
                await self._take(member, await member.link.receive())
        except ChannelClosed as error:
            reason = error.reason
        except ProtocolError as error:
            reason = str(error)
            await member.link.end_with(Error("protocol", clipped(reason)))
        finally:
            reason = reason or member.gone_because or "the coordinator ends"
            _log.info("node %s left: %s", member.node_id, reason)
            self._members.remove(member, reason)
            self._traffic.member_left(member)

    def _settle(self, member: Member) -> None:
        member.rest()
        if not member.paused:
            self._traffic.member_joined(member)

    async def _take(self, member: Member, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, NodeState):
            member.reported = message
        elif isinstance(message, LoadProgress):
            member.detail, member.progress = message.phase, (message.done, message.total)
            member.post(message)
        elif isinstance(message, (LoadComplete, LoadFailed, PeerConnected)):
            member.post(message)
        elif isinstance(message, Pause):
            member.pause(message.reason, leaves=message.leaves)
            if member.state == "paused":
                self._settle(member)
            self._members.notify()
        elif isinstance(message, Leave):
            raise ChannelClosed("it left", message.reason)
        elif isinstance(message, Error):
            raise ChannelClosed("it ended the link", message.message)
        else:
            await self._traffic.take(member, packet)


def _refusal(hello: Message) -> Error:
    if not isinstance(hello, Hello):
        return Error("not_a_node", f"HELLO is expected first, not {hello.TYPE}")
    return Error(
        "protocol_version",
        f"the coordinator speaks protocol {PROTOCOL_VERSION} (core {core.__version__}) and this node protocol"
        f" {hello.protocol} (core {hello.core_version or 'unknown'}): install the same version on both",
    )
