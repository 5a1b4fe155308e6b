"""The API's connections: how many there are, in all and from one address, and those that are half closed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from core.gateway.answers.answer import COMMENT
from core.port_limits import API_SHARE, connections_within, neighbourhood

MAX_CONNECTIONS = 1024
ADDRESS_SHARE = 4
"""An address beyond this machine may have one in so many of the connections."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 5\r\n\r\n"
    b'{"error":{"message":"too many connections are open: try again later","type":"server_error","code":null}}'
)


class Connection(H11Protocol):
    """A client that has closed its own direction, once its request was complete, is answered nevertheless.

    `half_closed` counts the server's ticks since. Such a client can't be told from one that is gone but by sending it
    something: a system that has nobody to give it to resets the connection.
    """

    half_closed: int | None = None

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's says so
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if waits:
            self.half_closed = 0
        return waits

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.half_closed is not None:
            self.transport.close()

    async def probe(self, streams: bool) -> None:
        """Sends what every client passes over: a comment of a stream, or before an answer an interim response."""
        if self.cycle.response_complete or self.flow.write_paused or self.transport.is_closing():
            return
        if streams:
            await self.cycle.send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        elif not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)


def most_connections() -> int:
    """How many there may be here, by what the system lets this process open."""
    return connections_within(API_SHARE, MAX_CONNECTIONS)


def protocol_for(most: int) -> type[Connection]:
    """uvicorn's, which answers 503 to a connection that would be one more than `most`, or than an address may have."""

    class BoundedConnection(Connection):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if _is_too_many(self.client, [getattr(each, "client", None) for each in self.connections], most):
                transport.write(_REFUSAL)
                transport.close()

    return BoundedConnection


def _is_too_many(client: tuple[str, int] | None, clients: Iterable[Any], most: int) -> bool:
    """`clients` are those of all connections, the new one's included."""
    everybody = [_neighbourhood(each) for each in clients]
    if len(everybody) > most:
        return True
    here = _neighbourhood(client)
    return here != "" and everybody.count(here) > max(1, most // ADDRESS_SHARE)


def _neighbourhood(client: tuple[str, int] | None) -> str:
    return neighbourhood(client[0]) if client else ""
