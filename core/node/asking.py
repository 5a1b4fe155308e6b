"""A node that asks to join without an invite: it shows a code, and waits until the host has compared it."""

from __future__ import annotations

import trio

from core.errors import ChannelClosed
from core.link import HANDSHAKE_SECONDS, Link
from core.node.state import Duty, Node
from core.protocol.messages import Asking, Message, Reveal
from core.trust.asking import ASK_SECONDS, code, commitment
from core.trust.cluster import Cluster
from core.trust.proof import new_nonce


class Request:
    """For one connection: another one has another code."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        self._node = node
        self._cluster = cluster
        self._nonce = new_nonce()
        self.commitment = commitment(self._nonce)

    async def answered(self, link: Link, asking: Asking) -> Message:
        """What the coordinator says when its host has decided. Raises ChannelClosed where it says nothing in time, or
        this node leaves meanwhile."""
        await link.send(Reveal(self._nonce))
        shown = code(self._cluster.fingerprint, self._node.identity.fingerprint, asking.nonce, self._nonce)
        told = f"tell the host this code: {shown}; it lets you in if it sees the same"
        self._node.activity.become("asking", told, code=shown)
        answer: Message | None = None
        with trio.move_on_after(ASK_SECONDS + HANDSHAKE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_leaving, self._node.duty, nursery.cancel_scope)
                answer = (await link.receive()).message
                nursery.cancel_scope.cancel()
        if answer is None:
            raise ChannelClosed("this machine asks no more", "it leaves, or the coordinator said nothing")
        return answer


async def _cancel_when_leaving(duty: Duty, scope: trio.CancelScope) -> None:
    await duty.wait_leave()
    scope.cancel()
