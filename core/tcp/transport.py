"""The transport: binds, connects, admits, and keeps one connection's failures from the others."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from core.errors import CoreError, leaves
from core.interfaces.transport import Channel, Credentials, Handler, Transport
from core.tcp import tls
from core.tcp.connection import Connection
from core.tcp.connection_limits import Full, Limits, RateLimitedLog, Seats
from core.tcp.failures import address, connect_failed, listen_failed

logger = logging.getLogger(__name__)

LIMITS = Limits()
SECONDS_BETWEEN_REFUSALS = 10.0
"""In the log, for those that had no seat."""
MAX_PORT = 65_535


class TcpTransport(Transport):
    """What carries messages over TCP, in TLS 1.3 if a listener has credentials and a dialler a pin.

    A peer has `handshake_timeout` seconds from its connecting until its channel is open.
    """

    def __init__(self, handshake_timeout: float = 5.0, limits: Limits = LIMITS) -> None:
        self._handshake_timeout = handshake_timeout
        self._limits = limits

    @abstractmethod
    async def accept(
        self, connection: Connection, nursery: trio.Nursery, settle: Callable[[], None], deadline: float
    ) -> Channel:
        """The listener's end of a channel, once the peer has greeted. What the channel needs tasks for, `nursery` runs.

        Raises ChannelClosed if the peer does not greet, or not by `deadline`.
        """

    @abstractmethod
    async def greet(self, connection: Connection, nursery: trio.Nursery, deadline: float) -> Channel:
        """The dialler's end, as of `accept`."""

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        seats, worth_a_line = Seats(self._limits.within_open_files()), RateLimitedLog(SECONDS_BETWEEN_REFUSALS)

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

        async def open_channel(nursery: trio.Nursery) -> Channel:
            secured = connection if credentials is None else await tls.accept(connection, credentials, deadline)
            return await self.accept(secured, nursery, settle, deadline)

        with _logged_failures(peer):
            async with _opened(connection, open_channel) as channel:
                with _logged_failures(peer):
                    await handler(channel)

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> AsyncIterator[Channel]:
        deadline = trio.current_time() + timeout
        peer = address(host, port)
        connection = Connection.over(await _connect(host, port, deadline), peer)

        async def open_channel(nursery: trio.Nursery) -> Channel:
            secured = connection if pin is None else await tls.dial(connection, pin, deadline)
            return await self.greet(secured, nursery, deadline)

        async with _opened(connection, open_channel) as channel:
            yield channel


@asynccontextmanager
async def _opened(
    connection: Connection, open_channel: Callable[[trio.Nursery], Awaitable[Channel]]
) -> AsyncIterator[Channel]:
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
