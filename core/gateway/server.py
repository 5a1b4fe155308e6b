"""uvicorn in a thread that one trio task owns."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import trio
import uvicorn
from litestar.types import ASGIApp

from core.errors import ConfigError
from core.gateway.app import create_app
from core.gateway.bridge import Bridge
from core.interfaces.engine import Engine

GRACE = 1
"""For how many seconds the ends of answers may still be written when the server stops; then connections are cut."""

KEEP_ALIVE = 60
BACKLOG = 1024


async def serve_http(
    engine: Engine,
    host: str,
    port: int,
    *,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves `engine` until cancelled; reports (host, port), as bound, once it does. Port 0 takes any free one.

    Raises ConfigError where the address can't be had. Cancelled, it ends what is under way, tells those clients,
    and is gone within two seconds.
    """
    with await _bind(host, port) as listener:
        async with trio.open_nursery() as nursery:
            token, serving = trio.lowlevel.current_trio_token(), trio.Event()
            app = create_app(engine, Bridge(nursery))
            server = _Server(app, on_startup=lambda: token.run_sync_soon(serving.set))
            nursery.start_soon(_run, server, listener)
            try:
                await serving.wait()
                bound = listener.getsockname()
                task_status.started((bound[0], bound[1]))
                await trio.sleep_forever()
            finally:
                server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, on_startup: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=2 * GRACE,
                backlog=BACKLOG,
            )
        )
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.get_running_loop().call_later(GRACE, self._cut)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(server.run, [listener], thread_name="gateway", limiter=trio.CapacityLimiter(1))


async def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; its protocol is said to be TCP, or asyncio would leave Nagle's algorithm on."""
    try:
        if not 0 <= port <= 65535:
            raise OverflowError("there is no such port")
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
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


def _hint(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return "stop what listens there, or choose another port; 0 takes any free one"
    if code == errno.EACCES:
        return "choose a port from 1024 up"
    return "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them; ports end at 65535"
