"""Frames that a thread sends past the event loop, on a connection whose peer reads late or not at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from core.tcp import connection as connection_module
from core.tcp.connection import sent

SECONDS = 300
FRAME = bytes(range(256)) * 255


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: this end doesn't block, and the peer's reads give up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with raw, peer:
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # no frame goes out at once
            peer.settimeout(SECONDS)
            yield raw, peer


def fill(raw: socket.socket) -> int:
    """Sends until no whole frame goes out any more; how many bytes did."""
    sent = 0
    while True:
        try:
            part = raw.send(FRAME)
        except BlockingIOError:
            return sent
        sent += part
        if part < len(FRAME):
            return sent


async def test_the_event_loop_never_waits_for_what_a_thread_finishes(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, peer = ends
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT", SECONDS)
    to_read = fill(raw)
    done: list[bool] = []

    async def send_whole_frame() -> None:
        while not done:
            if await trio.to_thread.run_sync(sent, raw, FRAME):
                done.append(True)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_whole_frame)
            to_read += len(FRAME)
            while to_read:
                await trio.lowlevel.checkpoint()
                with pytest.raises(BlockingIOError):
                    raw.recv(1)
                to_read -= len(await trio.to_thread.run_sync(peer.recv, min(to_read, 4096)))
    assert done == [True]


async def test_who_receives_is_woken_where_the_peer_does_not_take_the_rest(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, _ = ends
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT", 0.01)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.wait_readable, raw)
            await trio.testing.wait_all_tasks_blocked()
            assert await trio.to_thread.run_sync(sent, raw, bytes(64 * 2**20))
    assert raw.recv(1) == b""
