"""The transport: TCP connections that become websockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import trio

from core import Channel
from core.tcp import Connection, TcpTransport
from core_plugin_websocket.channel import MAX_MESSAGE, WebSocketChannel
from core_plugin_websocket.handshake import accept_client, greet_server


class TrioWebsocketTransport(TcpTransport):
    name: ClassVar[str] = "trio-websocket"
    max_message: ClassVar[int] = MAX_MESSAGE

    async def accept(
        self, connection: Connection, nursery: trio.Nursery, settle: Callable[[], None], deadline: float
    ) -> Channel:
        received = await accept_client(connection.stream, connection.peer, deadline)
        return WebSocketChannel(connection, received, nursery, client=False, settle=settle)

    async def greet(self, connection: Connection, nursery: trio.Nursery, deadline: float) -> Channel:
        received = await greet_server(connection.stream, connection.peer, deadline)
        return WebSocketChannel(connection, received, nursery, client=True)
