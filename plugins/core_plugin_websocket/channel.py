"""A channel over an open websocket: as over any connection, and pings are answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from core import ChannelClosed
from core.tcp import Connection, FramedChannel
from core_plugin_websocket.framing import Frames

MAX_MESSAGE = 1024 * 1024


class WebSocketChannel(FramedChannel):
    """`received` is what came behind the handshake; `nursery` is for answers to pings.

    Sends no pings: with large messages both ways they deadlock with peers that answer where they read.
    """

    def __init__(
        self,
        connection: Connection,
        received: bytes,
        nursery: trio.Nursery,
        *,
        client: bool,
        settle: Callable[[], None] | None = None,
    ) -> None:
        frames = Frames(received, client=client, limit=MAX_MESSAGE, on_ping=self._answer_ping)
        super().__init__(connection, frames, settle)
        self._nursery = nursery
        self._pong = b""

    def _answer_ping(self, pong: bytes) -> None:
        """From a task of its own: peers that send where they should receive may wait for each other for ever."""
        if not self._pong:
            self._nursery.start_soon(self._send_pong)
        self._pong = pong

    async def _send_pong(self) -> None:
        pong, self._pong = self._pong, b""
        with suppress(ChannelClosed):
            await self._write(pong)
