"""Whole messages over websockets: trio_websocket, with its traps closed off and its errors translated."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import trio
import trio_websocket
from wsproto.utilities import LocalProtocolError

from core import Channel, CoreError, Handler, Transport
from core.errors import ChannelClosed, leaves
from core_plugin_websocket.failures import address, closed, connect_failed, handshake_failed, listen_failed
from core_plugin_websocket.framing import binary_frame
from core_plugin_websocket.masking import install_masker

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1024 * 1024
MAX_CONNECTIONS = 256
MAX_PORT = 65_535
SENT_AT_ONCE = 64 * 1024
"""Bytes of a message that may go past the event loop: what a socket's buffer takes without waiting."""
CLOSE_TIMEOUT = 1.0
"""Seconds that a peer has to answer a close before the socket is closed over its head."""
LIMITS = {"max_message_size": MAX_MESSAGE, "receive_buffer_size": 256 * 1024}
ENDED = (
    trio_websocket.ConnectionClosed,
    LocalProtocolError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class WebSocketChannel(Channel):
    """A channel over an open websocket. Sends no pings: with large messages both ways they deadlock."""

    def __init__(self, socket: trio_websocket.WebSocketConnection, connection: _Connection) -> None:
        self.peer = connection.peer
        self.local_host = connection.raw.getsockname()[0]
        self._socket = socket
        self._stream = connection.stream
        self._raw = connection.raw

    async def send(self, data: bytes) -> None:
        try:
            await self._socket.send_message(data)
        except trio.Cancelled:
            self._stream.socket.close()  # half a frame may be out, and the peer would read the next as its rest
            raise
        except ENDED as error:
            raise closed(self.peer, error) from None

    def send_now(self, data: bytes) -> bool:
        if len(data) > SENT_AT_ONCE:
            return False
        frame = binary_frame(data, masked=self._socket.is_client)
        try:
            sent = self._raw.send(frame)
        except OSError:
            return False  # no room in the socket's buffer now, or no connection any more: `send` will tell
        if sent < len(frame):
            self._finish(frame[sent:])
        return True

    def _finish(self, rest: bytes) -> None:
        """The peer would read the next frame as the rest of this one: it is sent now, or the connection ends."""
        try:
            self._raw.settimeout(CLOSE_TIMEOUT)
            self._raw.sendall(rest)
            self._raw.setblocking(False)
        except OSError:
            self._raw.close()

    async def receive(self) -> bytes:
        try:
            message = await self._socket.get_message()
        except ENDED as error:
            raise closed(self.peer, error) from None
        if isinstance(message, bytes):
            return message
        await self.aclose()
        raise ChannelClosed(
            f"the connection to {self.peer} was closed",
            "it sent a text message where only binary ones are spoken",
            "check that what connects there is a node",
        )

    async def aclose(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT):
            await self._socket.aclose()
        self._stream.socket.close()


class TrioWebsocketTransport(Transport):
    """Websockets without TLS. A peer has `handshake_timeout` seconds from its connecting to become a websocket."""

    name: ClassVar[str] = "trio-websocket"
    max_message: ClassVar[int] = MAX_MESSAGE

    def __init__(self, handshake_timeout: float = 5.0, max_connections: int = MAX_CONNECTIONS) -> None:
        self._handshake_timeout = handshake_timeout
        self._max_connections = max_connections

    async def listen(
        self, host: str, port: int, handler: Handler, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        install_masker()
        seats = trio.CapacityLimiter(self._max_connections)

        async def admit(stream: trio.SocketStream) -> None:
            try:
                seats.acquire_on_behalf_of_nowait(stream)
            except trio.WouldBlock:
                logger.warning("a connection was refused: %d are open already", self._max_connections)
                return
            try:
                await self._serve(stream, handler)
            finally:
                seats.release_on_behalf_of(stream)

        listeners = await _bind(host, port)
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, admit, listeners)
            task_status.started(listeners[0].socket.getsockname()[1])

    async def _serve(self, stream: trio.SocketStream, handler: Handler) -> None:
        """Runs one connection from handshake to close; whatever goes wrong in it ends here."""

        async def shake_hands(reader: _Reader) -> trio_websocket.WebSocketConnection:
            request = await trio_websocket.wrap_server_stream(reader, connection.stream, **LIMITS)
            return await request.accept()

        try:
            peer = address(*stream.socket.getpeername()[:2])
        except OSError:
            return  # it left again at once
        connection = _Connection.over(stream, peer)
        deadline = trio.current_time() + self._handshake_timeout
        with _logged_failures(peer):
            async with _opened(connection, shake_hands, deadline) as channel:
                with _logged_failures(peer):
                    await handler(channel)

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float) -> AsyncIterator[Channel]:
        install_masker()
        deadline = trio.current_time() + timeout
        peer = address(host, port)
        connection = _Connection.over(await _connect(host, port, deadline), peer)

        async def shake_hands(reader: _Reader) -> trio_websocket.WebSocketConnection:
            return await trio_websocket.wrap_client_stream(reader, connection.stream, peer, "/", **LIMITS)

        async with _opened(connection, shake_hands, deadline) as channel:
            yield channel


@dataclass(frozen=True, slots=True)
class _Connection:
    """A TCP connection, as trio's stream and as the plain socket under it, which any thread can send on."""

    stream: trio.SocketStream
    raw: socket.socket
    peer: str

    @classmethod
    def over(cls, stream: trio.SocketStream, peer: str) -> _Connection:
        """Takes `stream`'s socket over: trio keeps its plain socket to itself."""
        raw = socket.socket(fileno=stream.socket.detach())
        raw.setblocking(False)
        return cls(trio.SocketStream(trio.socket.from_stdlib_socket(raw)), raw, peer)


class _Reader:
    """Stands in for the nursery that trio_websocket starts its reader in.

    The library's reader lets a hostile peer's bytes raise, and a handshake wait on after it ended. Here its failure
    is kept, its end ends the handshake, and the socket is closed with it.
    """

    def __init__(self, nursery: trio.Nursery, stream: trio.SocketStream, handshake: trio.CancelScope) -> None:
        self.ended = False
        self.failure: Exception | None = None
        self._nursery = nursery
        self._stream = stream
        self._handshake = handshake

    def start_soon(self, read: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, read)

    async def _run(self, read: Callable[[], Awaitable[None]]) -> None:
        try:
            await read()
        except Exception as error:
            logger.debug("the reader of a websocket failed", exc_info=True)
            self.failure = error
        self.ended = True
        self._stream.socket.close()
        self._handshake.cancel()


Handshake = Callable[[_Reader], Awaitable[Any]]


@asynccontextmanager
async def _opened(connection: _Connection, shake_hands: Handshake, deadline: float) -> AsyncIterator[WebSocketChannel]:
    """The channel over `connection` after the handshake, or ChannelClosed. Closes both at the end."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            channel = await _handshake(nursery, connection, shake_hands, deadline)
            try:
                yield channel
            finally:
                await channel.aclose()
        except BaseException as error:
            failure = error  # raised outside, for the nursery would wrap it in a group
        finally:
            connection.stream.socket.close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _handshake(
    nursery: trio.Nursery, connection: _Connection, shake_hands: Handshake, deadline: float
) -> WebSocketChannel:
    with trio.CancelScope(deadline=deadline) as scope:
        reader = _Reader(nursery, connection.stream, scope)
        try:
            return WebSocketChannel(await shake_hands(reader), connection)
        except (*ENDED, OSError) as error:
            raise closed(connection.peer, error) from None
    raise handshake_failed(connection.peer, reader.ended, reader.failure)


async def _connect(host: str, port: int, deadline: float) -> trio.SocketStream:
    with trio.CancelScope(deadline=deadline):
        try:
            _check_port(port)
            return await trio.open_tcp_stream(host, port)
        except (OSError, OverflowError, ValueError) as error:
            raise connect_failed(address(host, port), error) from error
    raise connect_failed(address(host, port), TimeoutError())


async def _bind(host: str, port: int) -> list[trio.SocketListener]:
    try:
        _check_port(port)
        return await trio.open_tcp_listeners(port, host=host)
    except (OSError, OverflowError, ValueError) as error:
        raise listen_failed(address(host, port), error) from error


def _check_port(port: int) -> None:
    """Some systems take a larger number and use its low 16 bits."""
    if not 0 <= port <= MAX_PORT:
        raise OverflowError(f"a port is a number up to {MAX_PORT}")


@contextmanager
def _logged_failures(peer: str) -> Iterator[None]:
    """Keeps one connection's failures from the others: the expected are logged in a line, bugs with a traceback."""
    try:
        yield
    except* CoreError as group:
        for error in leaves(group):
            logger.info("connection from %s: %s", peer, error)
    except* Exception:
        logger.exception("connection from %s: its handler failed", peer)
