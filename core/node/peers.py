"""Links between neighbours of a route: the downstream node dials the upstream one, which hands it hidden states.

That direction is the cheap one on a transport that masks what a client sends.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from core.errors import ChannelClosed, CoreError, ProtocolError, TrustError
from core.interfaces.transport import Channel, Transport
from core.link import HANDSHAKE_SECONDS, Link, first_message, greeting, open_link
from core.node.proof import answer_challenge
from core.protocol.fields import clipped
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    ConnectPeer,
    Error,
    ErrorCode,
    HelloAck,
    Message,
    PeerHello,
)
from core.trust.addresses import is_this_machine
from core.trust.identity import Identity
from core.trust.proof import verified

_log = logging.getLogger(__name__)


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
        except Exception as error:
            _log.exception("%s:%d could not be dialled", host, order.port)
            reasons.append(f"{host}:{order.port}: {type(error).__name__}: {error}")
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
    await link.send(PeerHello(PROTOCOL_VERSION, order.upstream, order.link_token, identity.certificate, signature))
    answer = await first_message(link)
    if isinstance(answer, Error):
        raise ProtocolError("the upstream node refused", answer.message)
    if not isinstance(answer, HelloAck):
        raise ProtocolError(f"the upstream node answered with a {answer.TYPE}")


@asynccontextmanager
async def accept_downstream(
    channel: Channel, find: Callable[[int], Assignment | None], identity: Identity
) -> AsyncIterator[tuple[Link, Assignment]]:
    """A link to the neighbour of a hop of this node, and that hop's assignment, which `find` knows by its number.

    The neighbour has the hop's token, and on an encrypted link the key that the coordinator named. Raises
    ProtocolError, after telling it, for any other.
    """
    async with open_link(channel) as link:
        hello, nonce = await greeting(link)
        assignment = find(hello.hop) if isinstance(hello, PeerHello) else None
        refusal = _refusal(hello, assignment) or _stranger(link, hello, assignment, nonce, identity)
        if refusal:
            await link.end_with(refusal)
            raise ProtocolError(f"{link.peer} is not the next hop", refusal.message)
        assert assignment is not None
        link.settle()
        await link.send(HelloAck(PROTOCOL_VERSION))
        yield link, assignment


def _stranger(
    link: Link, hello: Message, assignment: Assignment | None, nonce: bytes, identity: Identity
) -> Error | None:
    """Why `hello`, with the right token, still is not from the next hop."""
    if not link.secure:
        return None
    assert isinstance(hello, PeerHello)
    assert assignment is not None
    try:
        fingerprint = verified("peer", hello.certificate, hello.signature, nonce, identity.fingerprint)
    except TrustError as error:
        return Error(ErrorCode.NO_PROOF, clipped(error))
    if fingerprint != assignment.downstream:
        return Error(ErrorCode.OTHER_KEY, "the coordinator named another machine as the next hop")
    return None


def _refusal(hello: Message, assignment: Assignment | None) -> Error | None:
    if not isinstance(hello, PeerHello):
        return Error(ErrorCode.NOT_A_PEER, f"PEER_HELLO is expected first, not {hello.TYPE}")
    if hello.protocol != PROTOCOL_VERSION:
        return Error(ErrorCode.PROTOCOL_VERSION, f"this node speaks protocol {PROTOCOL_VERSION}, you {hello.protocol}")
    if assignment is None:
        return Error(ErrorCode.OTHER_HOP, f"this node has no hop {hello.hop}")
    if not hmac.compare_digest(hello.link_token, assignment.link_token):
        return Error(ErrorCode.WRONG_TOKEN, "the link token is not the one of this hop")
    return None
