"""uvicorn in a thread that one trio task owns."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any, cast

import trio
import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send

from core.errors import ConfigError
from core.gateway.answers.answer import EVENT_STREAM
from core.gateway.app import create_app
from core.gateway.bridge import Bridge
from core.gateway.connections import Connection, most_connections, protocol_for
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Engine

GRACE = 1
"""For how many seconds the ends of answers may still be written when the server stops; then connections are cut."""

FIRST_PROBES = 3
PROBE_TICKS = 50
"""uvicorn ticks ten times a second: a client that has closed its direction is probed at first, and then every 5 s."""

BODY_PATIENCES = 5
"""A body that comes in ever so small parts may take so many times the patience that each of them may."""
KEEP_ALIVE = 60
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""asyncio takes as many connections in one go as it is told that may wait, before it lets any be refused: a burst would
take all files that the process may open, and log each connection that it then can't take."""
DEFAULTS = ApiSettings()


async def serve_http(
    engine: Engine,
    host: str,
    port: int,
    settings: ApiSettings = DEFAULTS,
    *,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves `engine` until cancelled; reports (host, port), as bound, once it does. Port 0 takes any free one.

    Raises ConfigError where the address can't be had, and where others reach it but no key is needed and that is not
    allowed. Cancelled, it ends what is under way, tells those clients, and is gone within two seconds.
    """
    with await _bind(host, port, settings) as listener:
        async with trio.open_nursery() as nursery:
            token, serving = trio.lowlevel.current_trio_token(), trio.Event()
            app = create_app(engine, Bridge(nursery, patience=settings.patience), settings)
            most = settings.max_connections or most_connections()
            server = _Server(app, settings.patience, most, on_startup=lambda: token.run_sync_soon(serving.set))
            nursery.start_soon(_run, server, listener)
            try:
                await serving.wait()
                bound = listener.getsockname()
                task_status.started((bound[0], bound[1]))
                await trio.sleep_forever()
            finally:
                server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, patience: float, most: int, on_startup: Callable[[], None]) -> None:
        self._app = app
        self._patience = patience
        self._busy = Counter[tuple[str, int] | None]()
        """Requests under way, by client."""
        self._idle: dict[asyncio.Transport, tuple[float, int]] = {}
        """Since when, and with how many bytes yet to be read."""
        self._streams: set[tuple[str, int] | None] = set()
        """Clients that a stream of events has begun for."""
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                loop="asyncio",
                http=protocol_for(most),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=2 * GRACE,
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        self._on_startup = on_startup

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cuts the connection of a client that does not read what it is sent, or send what it announced.

        HEAD is answered as GET is, without the body.
        """
        client = scope["client"]
        arriving = True
        all_here = asyncio.get_running_loop().time() + BODY_PATIENCES * self._patience
        is_head = scope.get("method") == "HEAD"
        if is_head:
            scope = cast(Scope, {**scope, "method": "GET"})

        async def patient_receive() -> Any:
            nonlocal arriving
            if not arriving:
                return await receive()
            async with self._patient(scope, all_here):
                message = await receive()
            arriving = bool(message.get("more_body"))
            return message

        async def patient_send(message: Any) -> None:
            begins = message["type"] == "http.response.start"
            if is_head and not begins:
                return
            if begins and EVENT_STREAM in message["headers"] and not is_head:
                self._streams.add(client)
            async with self._patient(scope):
                await send(message)
                if is_head:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

        self._busy[client] += 1
        try:
            await self._app(scope, patient_receive, patient_send)
        finally:
            self._busy[client] -= 1
            self._streams.discard(client)
            if not self._busy[client]:
                del self._busy[client]

    @asynccontextmanager
    async def _patient(self, scope: Scope, until: float = math.inf) -> AsyncIterator[None]:
        """Cuts the connection if the block takes too long, or goes on after `until` by the loop's clock."""
        loop = asyncio.get_running_loop()
        cutting = loop.call_at(min(loop.time() + self._patience, until), self._cut_one, scope["client"])
        try:
            yield
        finally:
            cutting.cancel()

    async def on_tick(self, counter: int) -> bool:
        self._cut_idle()
        await self._probe_half_closed()
        return await super().on_tick(counter)

    async def _probe_half_closed(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.half_closed is not None:
                connection.half_closed += 1
                if connection.half_closed <= FIRST_PROBES or connection.half_closed % PROBE_TICKS == 0:
                    await connection.probe(_peer(connection.transport) in self._streams)

    def _cut_idle(self) -> None:
        """Cuts connections that for too long had no request under way, and read no more of an answer."""
        now, idle = time.monotonic(), self._idle
        self._idle = {}
        for transport in self._transports():
            if _peer(transport) not in self._busy:
                left = transport.get_write_buffer_size()
                since, before = idle.get(transport, (now, left))
                self._idle[transport] = (now if left < before else since, left)
                if now - since > self._patience:
                    transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self._on_startup()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.get_running_loop().call_later(GRACE, self._cut_all)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut_one(self, client: tuple[str, int] | None) -> None:
        for transport in self._transports():
            if _peer(transport) == client:
                transport.abort()

    def _cut_all(self) -> None:
        for transport in self._transports():
            transport.abort()

    def _transports(self) -> list[asyncio.Transport]:
        return [connection.transport for connection in self.server_state.connections]


def _peer(transport: asyncio.Transport) -> tuple[str, int] | None:
    """As a request's scope has it."""
    name = transport.get_extra_info("peername")
    return (str(name[0]), int(name[1])) if name else None


async def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(server.run, [listener], thread_name="gateway", limiter=trio.CapacityLimiter(1))


async def _bind(host: str, port: int, settings: ApiSettings) -> socket.socket:
    """A listening socket; its protocol is said to be TCP, or asyncio would leave Nagle's algorithm on."""
    try:
        if not 0 <= port <= 65535:
            raise OverflowError("there is no such port")
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        _require_keys(str(address[0]), settings)
        listener = socket.socket(family, kind, protocol)
        try:
            if sys.platform == "win32":  # where SO_REUSEADDR would let another program take the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"can't serve HTTP on {host}:{port}", reason, _hint(error)) from error
    return listener


def _require_keys(address: str, settings: ApiSettings) -> None:
    if not (settings.had_keys or settings.allow_anonymous or ip_address(address).is_loopback):
        raise ConfigError(
            f"the API would be open to everyone who reaches {address}",
            "it has no API key",
            "give keys with core keys add, --api-key-file or CORE_API_KEY, listen on --api-host 127.0.0.1, "
            "or let everyone in with --allow-anonymous-api",
        )


def _hint(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return "stop what listens there, or choose another port; 0 takes any free one"
    if code == errno.EACCES:
        return "choose a port from 1024 up"
    return "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them; ports end at 65535"
