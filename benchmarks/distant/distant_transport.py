"""A transport plugin as the one over websockets, but every message arrives later: as from a machine far away."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import trio
from core_plugin_websocket.transport import TrioWebsocketTransport

from core import hookimpl
from core.errors import ChannelClosed
from core.interfaces.transport import Channel, Credentials, Handler, Transport

DELAY_SECONDS = float(os.environ.get("DISTANT_MS", "20")) / 1000
_QUEUE = 4096


class DistantChannel(Channel):
    """Reads the near channel at once, and hands its messages out when their time has come."""

    def __init__(self, near: Channel) -> None:
        self.peer, self.local_host, self.secure = near.peer, near.local_host, near.secure
        self.settled = near.settled  # type: ignore[method-assign]
        self.send, self.send_now, self.aclose = near.send, near.send_now, near.aclose  # type: ignore[method-assign]
        self._near = near
        self._put, self._queue = trio.open_memory_channel[tuple[float, bytes | ChannelClosed]](_QUEUE)

    async def read(self) -> None:
        while True:
            try:
                frame: bytes | ChannelClosed = await self._near.receive()
            except ChannelClosed as error:
                frame = error
            await self._put.send((trio.current_time() + DELAY_SECONDS, frame))
            if isinstance(frame, ChannelClosed):
                return

    async def receive(self) -> bytes:
        due, frame = await self._queue.receive()
        await trio.sleep_until(due)
        if isinstance(frame, ChannelClosed):
            raise frame
        return frame

    async def send(self, data: bytes) -> None: ...

    async def aclose(self) -> None: ...


class DistantTransport(Transport):
    name: ClassVar[str] = "distant"
    max_message: ClassVar[int] = TrioWebsocketTransport.max_message

    def __init__(self) -> None:
        self._near = TrioWebsocketTransport()

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def serve(channel: Channel) -> None:
            async with _distant(channel) as far:
                await handler(far)

        await self._near.listen(host, port, serve, credentials=credentials, task_status=task_status)

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> AsyncIterator[Channel]:
        async with self._near.dial(host, port, timeout=timeout, pin=pin) as channel, _distant(channel) as far:
            yield far


@asynccontextmanager
async def _distant(channel: Channel) -> AsyncIterator[Channel]:
    far = DistantChannel(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.read)
        yield far
        nursery.cancel_scope.cancel()


@hookimpl
def core_transports() -> list[type[Transport]]:
    return [DistantTransport]
