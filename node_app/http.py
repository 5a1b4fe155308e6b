"""A small HTTP server on trio and h11, for a page that one user opens on one machine: one request per connection."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import trio

LOOPBACK = "127.0.0.1"
MAX_BODY = 64 * 1024
MAX_HEAD = 16 * 1024
REQUEST_SECONDS = 10.0
"""What a request may take in all, from the connection to the answer's last byte."""
MAX_CONNECTIONS = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """`headers` by lower-case name."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes = b""
    type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]


async def serve(handler: Handler, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
    """Serves on a free port of loopback until cancelled; reports the port. A handler that raises costs its request."""
    turns = trio.CapacityLimiter(MAX_CONNECTIONS)
    [listener] = await trio.open_tcp_listeners(0, host=LOOPBACK)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, partial(_attend, handler, turns), [listener])
        task_status.started(listener.socket.getsockname()[1])


async def _attend(handler: Handler, turns: trio.CapacityLimiter, stream: trio.SocketStream) -> None:
    with trio.move_on_after(REQUEST_SECONDS):
        async with stream, turns:
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
            try:
                await _answer(handler, connection, stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return


async def _answer(handler: Handler, connection: h11.Connection, stream: trio.SocketStream) -> None:
    try:
        request = await _read(connection, stream)
    except h11.RemoteProtocolError as error:
        await _send(connection, stream, Response(str(error).encode(), status=error.error_status_hint))
        return
    if request is None:
        return
    try:
        response = await handler(request)
    except Exception:
        _log.exception("%s failed", request.method)
        response = Response(b"this failed; the log says more", status=500)
    await _send(connection, stream, response)


async def _read(connection: h11.Connection, stream: trio.SocketStream) -> Request | None:
    """None where the peer left without asking anything. Raises RemoteProtocolError for a request that can't be."""
    head = await _next_event(connection, stream)
    if not isinstance(head, h11.Request):
        return None
    body = bytearray()
    while not isinstance(event := await _next_event(connection, stream), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            return None
        body += event.data
        if len(body) > MAX_BODY:
            raise h11.RemoteProtocolError(f"more than {MAX_BODY} bytes", error_status_hint=413)
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
    return Request(head.method.decode("ascii"), head.target.decode("ascii"), headers, bytes(body))


async def _next_event(connection: h11.Connection, stream: trio.SocketStream) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        if connection.they_are_waiting_for_100_continue:
            await stream.send_all(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        connection.receive_data(await stream.receive_some(MAX_HEAD))
    return event


async def _send(connection: h11.Connection, stream: trio.SocketStream, response: Response) -> None:
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = {
        "content-type": response.type,
        "content-length": str(len(response.body)),
        "connection": "close",
        **response.headers,
    }
    events = (
        h11.Response(status_code=response.status, headers=list(headers.items())),
        h11.Data(data=response.body),
        h11.EndOfMessage(),
    )
    await stream.send_all(b"".join(connection.send(event) or b"" for event in events))
    await stream.send_eof()
