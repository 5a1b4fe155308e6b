"""The demo's question, where the API does not answer as it should."""

from __future__ import annotations

import socket

import pytest
import trio

from core.cli.demo import _events
from core.errors import CoreError


async def ask(port: int) -> None:
    async for _ in _events(f"http://127.0.0.1:{port}/v1/chat/completions", {}):
        pass


async def test_an_api_that_is_gone_is_said_to_be() -> None:
    with trio.fail_after(300), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(CoreError, match=r"the answer broke off: .*connect"):
            await ask(taken.getsockname()[1])


async def test_no_proxy_comes_between_the_demo_and_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(stream: trio.SocketStream) -> None:
        asked.append((await stream.receive_some(4096)).decode().split()[1])
        await stream.send_all(b"HTTP/1.1 503 Later\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy")

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, refuse, [listener])
            with pytest.raises(CoreError, match="refused: busy"):
                await ask(listener.socket.getsockname()[1])
            nursery.cancel_scope.cancel()
    assert asked == ["/v1/chat/completions"]
