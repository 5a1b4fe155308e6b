"""The dialler's part in an encrypted link's beginning: the listener asks, and this machine proves who it is."""

from __future__ import annotations

from core.errors import ProtocolError
from core.link import Link, first_message
from core.protocol.messages import Challenge
from core.trust.identity import Identity
from core.trust.proof import Role, signature


async def answer_challenge(link: Link, identity: Identity, role: Role, listener: bytes | None) -> bytes | None:
    """The signature for a greeting on `link`, to the listener with this fingerprint; None on a plain link, where none
    is asked for. Raises ProtocolError where the listener begins with something else."""
    if not link.secure or listener is None:
        return None
    challenge = await first_message(link)
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"{link.peer} began with a {challenge.TYPE}", "CHALLENGE is expected first")
    return signature(identity, role, challenge.nonce, listener)
