"""Links between neighbours of a route: the downstream node dials the upstream one, which hands it hidden states.

That direction is the cheap one on a transport that masks what a client sends.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from core.errors import ChannelClosed, CoreError, ProtocolError
from core.interfaces.transport import Channel, Transport
from core.link import HANDSHAKE_SECONDS, Link, first_message, greeting, open_link
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    ConnectPeer,
    Error,
    HelloAck,
    Message,
    PeerHello,
)


@asynccontextmanager
async def dial_upstream(transport: Transport, order: ConnectPeer) -> AsyncIterator[Link]:
    """A link to the neighbour that `order` names, by the first of its addresses that answers.

    Raises ChannelClosed with each address's reason where none does.
    """
    async with AsyncExitStack() as stack:
        yield await _first_that_answers(stack, transport, order)


async def _first_that_answers(stack: AsyncExitStack, transport: Transport, order: ConnectPeer) -> Link:
    reasons = []
    for host in order.hosts:
        try:
            async with AsyncExitStack() as attempt:
                channel = await attempt.enter_async_context(transport.dial(host, order.port, timeout=HANDSHAKE_SECONDS))
                link = await attempt.enter_async_context(open_link(channel))
                await _introduce(link, order)
                stack.push_async_exit(attempt.pop_all())
                return link
        except CoreError as error:
            reasons.append(f"{host}:{order.port}: {error}")
    raise ChannelClosed("no address of the upstream node answers", "; ".join(reasons) or "it names none")


async def _introduce(link: Link, order: ConnectPeer) -> None:
    await link.send(PeerHello(PROTOCOL_VERSION, order.epoch, order.link_token))
    answer = await first_message(link)
    if isinstance(answer, Error):
        raise ProtocolError("the upstream node refused", answer.message)
    if not isinstance(answer, HelloAck):
        raise ProtocolError(f"the upstream node answered with a {answer.TYPE}")


@asynccontextmanager
async def accept_downstream(channel: Channel, assignment: Assignment | None) -> AsyncIterator[Link]:
    """A link to the neighbour that has this stage's token. Raises ProtocolError, after telling it, for any other."""
    async with open_link(channel) as link:
        refusal = _refusal(await greeting(link), assignment)
        if refusal:
            await link.end_with(refusal)
            raise ProtocolError(f"{link.peer} is not the next stage", refusal.message)
        await link.send(HelloAck(PROTOCOL_VERSION))
        yield link


def _refusal(hello: Message, assignment: Assignment | None) -> Error | None:
    if not isinstance(hello, PeerHello):
        return Error("not_a_peer", f"PEER_HELLO is expected first, not {hello.TYPE}")
    if hello.protocol != PROTOCOL_VERSION:
        return Error("protocol_version", f"this node speaks protocol {PROTOCOL_VERSION}, you {hello.protocol}")
    if assignment is None or hello.epoch != assignment.epoch:
        return Error("other_epoch", f"this node is not on route epoch {hello.epoch}")
    if not hmac.compare_digest(hello.link_token, assignment.link_token):
        return Error("wrong_token", "the link token is not the one of this route")
    return None
