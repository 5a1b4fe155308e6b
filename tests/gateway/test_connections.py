"""The API's connections are bounded, in all and by address, and those that are served go on."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import trio

from core.gateway.connections import MAX_CONNECTIONS, Connection, _is_too_many, most_connections
from core.gateway.server import ACCEPTED_AT_ONCE, serve_http
from core.gateway.settings import ApiSettings

MOST = 8


async def test_one_connection_too_many_is_told_so_and_the_others_are_served(engine: Any, nursery: trio.Nursery) -> None:
    with trio.fail_after(300):
        host, port = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(max_connections=MOST))
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client, AsyncExitStack() as idle:
            assert (await client.get("/v1/models")).status_code == 200
            for _ in range(MOST - 1):
                await idle.enter_async_context(await trio.open_tcp_stream(host, port))
            async with await trio.open_tcp_stream(host, port) as late:
                said = b""
                while chunk := await late.receive_some():
                    said += chunk
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"too many connections" in said
            assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.skipif(sys.platform == "win32", reason="another event loop is used there")
async def test_a_burst_is_taken_a_few_at_a_time_so_that_each_can_be_refused_before_the_next(
    engine: Any, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, all_wait = [0], threading.Event()
    accept, connection_made = socket.socket.accept, Connection.connection_made

    def held_up(listener: socket.socket) -> Any:
        assert all_wait.wait(300)
        accepted = accept(listener)
        taken[-1] += 1
        return accepted

    def made(connection: Connection, transport: Any) -> None:
        taken.append(0)
        connection_made(connection, transport)

    with trio.fail_after(300):
        host, port = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(max_connections=MOST))
        monkeypatch.setattr(Connection, "connection_made", made)
        monkeypatch.setattr(socket.socket, "accept", held_up)
        async with AsyncExitStack() as burst:
            for _ in range(6 * ACCEPTED_AT_ONCE):
                last = await burst.enter_async_context(await trio.open_tcp_stream(host, port))
            all_wait.set()
            assert b"too many connections" in await last.receive_some()
    assert max(taken) <= 2 * ACCEPTED_AT_ONCE, "the first are made when the second few have been taken"


@pytest.mark.parametrize(
    ("new", "others", "refused"),
    [
        ("192.168.1.2", ["192.168.1.2"], False),
        ("192.168.1.2", ["192.168.1.2"] * 2, True),
        ("192.168.1.3", ["192.168.1.2"] * 2, False),
        ("2001:db8::1", ["2001:db8::2", "2001:db8::3"], True),
        ("2001:db8:0:1::1", ["2001:db8::2", "2001:db8::3"], False),
        ("127.0.0.1", ["127.0.0.1"] * 7, False),
        ("::1", ["127.0.0.1"] * 8, True),
    ],
)
def test_an_address_beyond_this_machine_has_its_share_and_ipv6_counts_by_network(
    new: str, others: list[str], refused: bool
) -> None:
    assert _is_too_many((new, 1), [(host, 1) for host in (*others, new)], MOST) is refused


def test_the_bound_leaves_files_for_all_else() -> None:
    assert 0 < most_connections() <= MAX_CONNECTIONS
