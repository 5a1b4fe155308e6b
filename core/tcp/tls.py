"""TLS 1.3 over a TCP connection, without authorities or names: the dialler knows the listener's certificate."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256

import trio

from core.interfaces.transport import Credentials
from core.tcp.connection import Connection
from core.tcp.failures import no_tls, wrong_certificate

_HANDSHAKE = b"\x16"
"""The first byte of a client that speaks TLS (RFC 8446, section 5.1), with which nothing else may begin."""


async def accept(connection: Connection, credentials: Credentials, deadline: float) -> Connection:
    """TLS where the client begins with it, and the connection as it is where not.

    Raises ChannelClosed where it does not finish the handshake in time.
    """
    with _failing_as_no_tls(connection.peer), trio.CancelScope(deadline=deadline) as scope:
        if await connection.tcp.socket.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
            return connection
        return await _shaken(connection, credentials.context, server_side=True)
    assert scope.cancelled_caught
    raise no_tls(connection.peer, TimeoutError())


async def dial(connection: Connection, pin: bytes, deadline: float) -> Connection:
    """TLS to the listener whose certificate has this SHA-256. Nothing but TLS's own handshake is sent to another one.

    Raises ChannelClosed where there is no TLS in time, TrustError for another certificate.
    """
    with _failing_as_no_tls(connection.peer), trio.CancelScope(deadline=deadline) as scope:
        secured = await _shaken(connection, _client_context(), server_side=False)
        assert isinstance(secured.stream, trio.SSLStream)
        certificate = secured.stream.getpeercert(binary_form=True)
        if not hmac.compare_digest(sha256(certificate).digest(), pin):
            raise wrong_certificate(connection.peer)
        return secured
    assert scope.cancelled_caught
    raise no_tls(connection.peer, TimeoutError())


async def _shaken(connection: Connection, context: ssl.SSLContext, *, server_side: bool) -> Connection:
    stream = trio.SSLStream(connection.tcp, context, server_side=server_side, https_compatible=True)
    await stream.do_handshake()
    return replace(connection, stream=stream, raw=None)


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin is the check
    return context


@contextmanager
def _failing_as_no_tls(peer: str) -> Iterator[None]:
    try:
        yield
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
        raise no_tls(peer, error) from None
