"""Links between neighbours of a route: the downstream node dials the upstream one, which hands it hidden states.

That direction is the cheap one on a transport that masks what a client sends.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from core.errors import ChannelClosed, CoreError, ProtocolError, TrustError
from core.interfaces.transport import Channel, Transport
from core.link import HANDSHAKE_SECONDS, Link, first_message, greeting, open_link
from core.node.proof import answer_challenge
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    ConnectPeer,
    Error,
    HelloAck,
    Message,
    PeerHello,
    clipped,
)
from core.trust.addresses import is_this_machine
from core.trust.identity import Identity
from core.trust.proof import verified


@asynccontextmanager
async def dial_upstream(transport: Transport, identity: Identity, order: ConnectPeer) -> AsyncIterator[Link]:
    """A link to the neighbour that `order` names, by the first of its addresses that answers. Encrypted, and with a
    proof of `identity`, unless it is on this machine.

    Raises ChannelClosed with each address's reason where none does.
    """
    async with AsyncExitStack() as stack:
        yield await _first_that_answers(stack, transport, identity, order)


async def _first_that_answers(
    stack: AsyncExitStack, transport: Transport, identity: Identity, order: ConnectPeer
) -> Link:
    reasons = []
    for host in order.hosts:
        try:
            async with AsyncExitStack() as attempt:
                dial = transport.dial(host, order.port, timeout=HANDSHAKE_SECONDS, pin=_pin(host, order))
                link = await attempt.enter_async_context(open_link(await attempt.enter_async_context(dial)))
                await _introduce(link, identity, order)
                stack.push_async_exit(attempt.pop_all())
                return link
        except CoreError as error:
            reasons.append(f"{host}:{order.port}: {error}")
    raise ChannelClosed("no address of the upstream node answers", "; ".join(reasons) or "it names none")


def _pin(host: str, order: ConnectPeer) -> bytes | None:
    """None for a neighbour on this machine. Raises ProtocolError where there is no way to know another one."""
    if is_this_machine(host):
        return None
    if order.fingerprint is None:
        raise ProtocolError("the coordinator sent no fingerprint of that node")
    return order.fingerprint


async def _introduce(link: Link, identity: Identity, order: ConnectPeer) -> None:
    signature = await answer_challenge(link, identity, "peer", order.fingerprint)
    await link.send(PeerHello(PROTOCOL_VERSION, order.epoch, order.link_token, identity.certificate, signature))
    answer = await first_message(link)
    if isinstance(answer, Error):
        raise ProtocolError("the upstream node refused", answer.message)
    if not isinstance(answer, HelloAck):
        raise ProtocolError(f"the upstream node answered with a {answer.TYPE}")


@asynccontextmanager
async def accept_downstream(channel: Channel, assignment: Assignment | None, identity: Identity) -> AsyncIterator[Link]:
    """A link to the neighbour that has this stage's token, and on an encrypted link the key that the coordinator named.

    Raises ProtocolError, after telling it, for any other.
    """
    async with open_link(channel) as link:
        hello, nonce = await greeting(link)
        refusal = _refusal(hello, assignment) or _stranger(link, hello, assignment, nonce, identity)
        if refusal:
            await link.end_with(refusal)
            raise ProtocolError(f"{link.peer} is not the next stage", refusal.message)
        link.settle()
        await link.send(HelloAck(PROTOCOL_VERSION))
        yield link


def _stranger(
    link: Link, hello: Message, assignment: Assignment | None, nonce: bytes, identity: Identity
) -> Error | None:
    """Why `hello`, with the right token, still is not from the next stage."""
    if not link.secure:
        return None
    assert isinstance(hello, PeerHello)
    assert assignment is not None
    try:
        fingerprint = verified("peer", hello.certificate, hello.signature, nonce, identity.fingerprint)
    except TrustError as error:
        return Error("no_proof", clipped(error))
    if fingerprint != assignment.downstream:
        return Error("other_key", "the coordinator named another machine as the next stage")
    return None


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
