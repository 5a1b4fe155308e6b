"""From a stream to a websocket: trio_websocket shakes hands, with its traps closed off, and reads nothing beyond."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio_websocket
from wsproto.utilities import LocalProtocolError

from core import ChannelClosed
from core_plugin_websocket.failures import ended, from_a_browser, handshake_failed

_logger = logging.getLogger(__name__)
_REQUEST = re.compile(rb"\n\r?\n")
_ACCEPTANCE = re.compile(rb"\AHTTP/1\.1 101\b.*?\n\r?\n", re.DOTALL)
_ENDED = (
    trio_websocket.ConnectionClosed,
    LocalProtocolError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    OSError,
)


async def accept_client(stream: trio.abc.Stream, peer: str, deadline: float) -> bytes:
    """Answers a client's handshake. Returns what came behind it; raises ChannelClosed where there is none in time.

    A browser is refused (RFC 6455, section 10.2): any web page may have it open a websocket to this very machine.
    """

    async def accept(reader: _Reader, head: _HeadStream) -> None:
        request = await trio_websocket.wrap_server_stream(reader, head)
        if any(name.lower() == b"origin" for name, _ in request.headers):
            await request.reject(403)
            raise from_a_browser(peer)
        await request.accept()

    return await _shake_hands(accept, _HeadStream(stream, _REQUEST), peer, deadline)


async def greet_server(stream: trio.abc.Stream, peer: str, deadline: float) -> bytes:
    """Asks a server for a websocket. Returns what came behind its answer; raises ChannelClosed as `accept_client`."""

    async def greet(reader: _Reader, head: _HeadStream) -> None:
        await trio_websocket.wrap_client_stream(reader, head, peer, "/")

    return await _shake_hands(greet, _HeadStream(stream, _ACCEPTANCE), peer, deadline)


class _HeadStream(trio.abc.Stream):
    """What of a stream the handshake may see: its bytes as far as `head` matches, and then no more.

    `rest` is what was received behind the head.
    """

    def __init__(self, stream: trio.abc.Stream, head: re.Pattern[bytes]) -> None:
        self._stream = stream
        self._head = head
        self._received = bytearray()
        self._passed_on = 0
        self.rest: bytes | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self.rest is not None:
            await trio.sleep_forever()
        self._received += await self._stream.receive_some(max_bytes)
        head = self._head.search(self._received)
        end = head.end() if head else len(self._received)
        if head:
            self.rest = bytes(self._received[end:])
        data = bytes(self._received[self._passed_on : end])
        self._passed_on = end
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Reader:
    """Stands in for the nursery that trio_websocket starts its reader in.

    The library's reader lets a hostile peer's bytes raise, and a handshake wait on after it ended. Here its failure
    is kept, and its end ends the handshake.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.ended = False
        self.failure: Exception | None = None
        self._nursery = nursery

    def start_soon(self, read: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, read)

    async def _run(self, read: Callable[[], Awaitable[None]]) -> None:
        try:
            await read()
        except Exception as error:
            _logger.debug("the reader of a websocket failed", exc_info=True)
            self.failure = error
        self.ended = True
        self._nursery.cancel_scope.cancel()


async def _shake_hands(
    shake: Callable[[_Reader, _HeadStream], Awaitable[Any]], head: _HeadStream, peer: str, deadline: float
) -> bytes:
    failure: Exception | None = None
    shaken = False
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = deadline
        reader = _Reader(nursery)
        try:
            await shake(reader, head)
            shaken = True
        except (*_ENDED, ChannelClosed) as error:
            failure = error
        nursery.cancel_scope.cancel()
    if isinstance(failure, ChannelClosed):
        raise failure
    if failure is not None:
        raise ended(peer, getattr(failure, "reason", None))
    if not shaken:
        raise handshake_failed(peer, reader.ended, reader.failure)
    return head.rest or b""
