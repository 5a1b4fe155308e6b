"""The transport: both ends greet with the same few bytes, and then send frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import trio

from core import Channel, ChannelClosed
from core.tcp import ENDED, Connection, FramedChannel, TcpTransport
from core_plugin_tcp.framing import LengthPrefixed

MAX_MESSAGE = 1024 * 1024
GREETING = b"core tcp 1\r\n"
"""Neither TLS nor HTTP begins so: what a web page has a browser send gets no answer."""
_RECEIVED_AT_ONCE = 4096


class PlainTcpTransport(TcpTransport):
    name: ClassVar[str] = "tcp"
    max_message: ClassVar[int] = MAX_MESSAGE

    async def accept(
        self, connection: Connection, nursery: trio.Nursery, settle: Callable[[], None], deadline: float
    ) -> Channel:
        return FramedChannel(connection, await _greeted(connection, deadline, speaks_first=False), settle)

    async def greet(self, connection: Connection, nursery: trio.Nursery, deadline: float) -> Channel:
        return FramedChannel(connection, await _greeted(connection, deadline, speaks_first=True))


async def _greeted(connection: Connection, deadline: float, *, speaks_first: bool) -> LengthPrefixed:
    """The frames behind the other end's greeting. Raises ChannelClosed if there is none, or none in time."""
    stream, received = connection.stream, b""
    with trio.CancelScope(deadline=deadline):
        try:
            if speaks_first:
                await stream.send_all(GREETING)
            while len(received) < len(GREETING):
                received += await _some(connection)
                if not GREETING.startswith(received[: len(GREETING)]):
                    raise _no_channel(connection, "it speaks something else")
            if not speaks_first:
                await stream.send_all(GREETING)
        except ENDED:
            raise _no_channel(connection, "it closed the connection during the handshake") from None
        return LengthPrefixed(received[len(GREETING) :], MAX_MESSAGE)
    raise _no_channel(connection, "it was connected, but did not finish the handshake in time")


async def _some(connection: Connection) -> bytes:
    data = await connection.stream.receive_some(_RECEIVED_AT_ONCE)
    if not data:
        raise trio.BrokenResourceError
    return bytes(data)


def _no_channel(connection: Connection, why: str) -> ChannelClosed:
    hint = "check the host and the port: something else may listen there, or core with another --transport"
    return ChannelClosed(f"no tcp channel with {connection.peer}", why, hint)
