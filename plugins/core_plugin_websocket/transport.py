"""The transport: binds, connects, admits, and keeps one connection's failures from the others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar

import trio

from core import Channel, CoreError, Credentials, Handler, Transport
from core.errors import leaves
from core_plugin_websocket import tls
from core_plugin_websocket.channel import MAX_MESSAGE, Connection, WebSocketChannel
from core_plugin_websocket.connection_limits import Full, Limits, RateLimitedLog, Seats
from core_plugin_websocket.failures import address, connect_failed, listen_failed
from core_plugin_websocket.handshake import accept_client, greet_server

logger = logging.getLogger(__name__)

LIMITS = Limits()
SECONDS_BETWEEN_REFUSALS = 10.0
"""In the log, for those that had no seat."""
MAX_PORT = 65_535


class TrioWebsocketTransport(Transport):
    """Websockets, in TLS 1.3 where a listener has credentials and a dialler a pin.

    A peer has `handshake_timeout` seconds from its connecting to become a websocket.
    """

    name: ClassVar[str] = "trio-websocket"
    max_message: ClassVar[int] = MAX_MESSAGE

    def __init__(self, handshake_timeout: float = 5.0, limits: Limits = LIMITS) -> None:
        self._handshake_timeout = handshake_timeout
        self._limits = limits

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        seats, worth_a_line = Seats(self._limits), RateLimitedLog(SECONDS_BETWEEN_REFUSALS)

        async def admit(stream: trio.SocketStream) -> None:
            try:
                host, port = stream.socket.getpeername()[:2]
            except OSError:
                return  # it left again at once
            try:
                with seats.seat(host) as settle:
                    await self._serve(stream, address(host, port), handler, credentials, settle)
            except Full as full:
                logger.log(
                    logging.WARNING if worth_a_line() else logging.DEBUG,
                    "a connection from %s was refused: %s",
                    host,
                    full,
                )

        listeners = await _bind(host, port)
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, admit, listeners)
            task_status.started(listeners[0].socket.getsockname()[1])

    async def _serve(
        self,
        stream: trio.SocketStream,
        peer: str,
        handler: Handler,
        credentials: Credentials | None,
        settle: Callable[[], None],
    ) -> None:
        """Runs one connection from handshake to close; whatever goes wrong in it ends here."""
        connection = Connection.over(stream, peer)
        deadline = trio.current_time() + self._handshake_timeout

        async def open_channel(nursery: trio.Nursery) -> WebSocketChannel:
            secured = connection if credentials is None else await tls.accept(connection, credentials, deadline)
            received = await accept_client(secured.stream, peer, deadline)
            return WebSocketChannel(secured, received, nursery, client=False, settle=settle)

        with _logged_failures(peer):
            async with _opened(connection, open_channel) as channel:
                with _logged_failures(peer):
                    await handler(channel)

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> AsyncIterator[Channel]:
        deadline = trio.current_time() + timeout
        peer = address(host, port)
        connection = Connection.over(await _connect(host, port, deadline), peer)

        async def open_channel(nursery: trio.Nursery) -> WebSocketChannel:
            secured = connection if pin is None else await tls.dial(connection, pin, deadline)
            received = await greet_server(secured.stream, peer, deadline)
            return WebSocketChannel(secured, received, nursery, client=True)

        async with _opened(connection, open_channel) as channel:
            yield channel


@asynccontextmanager
async def _opened(
    connection: Connection, open_channel: Callable[[trio.Nursery], Awaitable[WebSocketChannel]]
) -> AsyncIterator[WebSocketChannel]:
    """The channel over `connection` that `open_channel` makes. Closes both at the end."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            channel = await open_channel(nursery)
            try:
                yield channel
            finally:
                await channel.aclose()
        except BaseException as error:
            failure = error  # raised outside, for the nursery would wrap it in a group
        finally:
            connection.cut()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


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
