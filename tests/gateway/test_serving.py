"""Clients that leave, many at once, and the server's own coming and going."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import ConfigError
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Delta

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
STREAM = {**COMPLETION, "stream": True}


def raw(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def gateway_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gateway"]


async def test_a_client_that_leaves_its_stream_frees_the_generation(address: tuple[str, int], engine: Any) -> None:
    engine.endless = "more "
    with trio.fail_after(300):
        async with await trio.open_tcp_stream(*address) as client:
            await client.send_all(raw(STREAM))
            seen = b""
            while b"more" not in seen:
                seen += await client.receive_some()
            assert engine.sessions == 1
        await engine.until(lambda e: e.sessions == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits_for", ["admission", "a token"])
async def test_a_client_that_leaves_while_it_waits_frees_the_generation(
    client: httpx.AsyncClient, engine: Any, nursery: trio.Nursery, stream: bool, waits_for: str
) -> None:
    if waits_for == "admission":
        engine.gate = trio.Event()
    else:
        engine.script = [trio.Event()]
    asking = trio.CancelScope()
    answers: list[httpx.Response] = []

    async def ask() -> None:
        with asking:
            answers.append(await client.post("/v1/completions", json={**COMPLETION, "stream": stream}))

    nursery.start_soon(ask)
    with trio.fail_after(300):
        await engine.until(lambda e: e.sessions == 1)
        asking.cancel()
        await engine.until(lambda e: e.sessions == 0)
    assert answers == []


async def test_a_client_that_leaves_in_mid_request_disturbs_nobody(
    address: tuple[str, int], client: httpx.AsyncClient, engine: Any
) -> None:
    stream = await trio.open_tcp_stream(*address)
    await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await stream.aclose()
    assert (await client.get("/health")).status_code == 200
    assert engine.requests == []


async def test_many_at_once(client: httpx.AsyncClient, engine: Any) -> None:
    engine.gate = trio.Event()
    texts: list[str] = []

    async def ask() -> None:
        texts.append((await client.post("/v1/completions", json=COMPLETION)).json()["choices"][0]["text"])

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask)
            await engine.until(lambda e: e.sessions == 40)
            assert (await client.get("/health")).status_code == 200
            engine.gate.set()
    assert texts == ["Hello world"] * 40
    assert engine.sessions == 0


async def test_a_stopped_server_ends_what_is_open_and_leaves_nothing(engine: Any) -> None:
    engine.script[1:] = [trio.Event()]
    answers: dict[str, httpx.Response] = {}

    async def ask(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> None:
        answers[name] = await client.post("/v1/completions", json=body)

    with trio.fail_after(300):
        async with trio.open_nursery() as clients:
            async with trio.open_nursery() as nursery:
                host, port = await nursery.start(serve_http, engine, "127.0.0.1", 0)
                client = await clients.start(_open_client, f"http://{host}:{port}")
                await client.get("/health")  # leaves a connection that is kept alive
                assert len(gateway_threads()) == 1
                clients.start_soon(ask, client, "stream", STREAM)
                clients.start_soon(ask, client, "whole", COMPLETION)
                await engine.until(lambda e: e.sessions == 2)
                nursery.cancel_scope.cancel()
            assert engine.sessions == 0
            assert gateway_threads() == []
            while len(answers) < 2:
                await wait_all_tasks_blocked(0.01)
            with pytest.raises(OSError):
                await trio.open_tcp_stream(host, port)
            clients.cancel_scope.cancel()
    assert answers["whole"].status_code == 503
    assert answers["whole"].json()["error"]["type"] == "server_shutting_down"
    last = answers["stream"].text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_shutting_down"


async def _open_client(url: str, *, task_status: trio.TaskStatus[httpx.AsyncClient] = trio.TASK_STATUS_IGNORED) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        task_status.started(client)
        await trio.sleep_forever()


async def test_a_client_that_does_not_read_holds_back_its_generation_and_no_shutdown(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.endless = "x" * 2**20
    with trio.fail_after(300), trio.socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with trio.open_nursery() as nursery:
            await client.connect(await nursery.start(serve_http, engine, "127.0.0.1", 0))
            await client.send(raw(STREAM))
            await engine.until(lambda e: e.given > 32)
            await wait_all_tasks_blocked(0.1)
            assert engine.given < 64
            nursery.cancel_scope.cancel()
        assert engine.sessions == 0
        assert gateway_threads() == []
    assert caplog.records == []


@pytest.mark.parametrize("body", [STREAM, COMPLETION])
async def test_a_client_that_does_not_read_is_cut_off(engine: Any, nursery: trio.Nursery, body: dict[str, Any]) -> None:
    engine.script = [Delta("x" * 2**24, 1, "stop")]
    with trio.fail_after(300), trio.socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(patience=0.05))
        await client.connect(address)
        await client.send(raw(body))
        with pytest.raises(OSError):
            while True:
                await client.send(b"x")
                await wait_all_tasks_blocked(0.01)
        assert engine.sessions == 0


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", raw(COMPLETION)[:-1]])
async def test_a_client_that_does_not_send_its_request_is_cut_off(
    engine: Any, nursery: trio.Nursery, sent: bytes
) -> None:
    address = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(patience=0.05))
    with trio.fail_after(300):
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(sent)
            assert await stream.receive_some() == b""


async def test_a_client_that_sends_its_request_ever_so_slowly_is_cut_off(engine: Any, nursery: trio.Nursery) -> None:
    address = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(patience=0.2))
    with trio.fail_after(300), trio.socket.socket() as client:
        await client.connect(address)
        head, _, body = raw(COMPLETION).partition(b"\r\n\r\n")
        length = b"content-length: %d" % len(body)
        assert length in head
        await client.send(head.replace(length, b"content-length: 1000000") + b"\r\n\r\n")
        with pytest.raises(OSError):
            while True:
                await client.send(b" ")
                await wait_all_tasks_blocked(0.01)


async def test_a_server_that_is_stopped_before_it_serves_leaves_nothing(engine: Any) -> None:
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_http, engine, "127.0.0.1", 0)
            nursery.cancel_scope.cancel()
    assert gateway_threads() == []


async def test_a_port_in_use_is_named(engine: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*choose another port"):
            await serve_http(engine, "127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)])
async def test_an_address_that_cannot_be_had_is_named(engine: Any, host: str, port: int) -> None:
    with trio.fail_after(300), pytest.raises(ConfigError, match=f"{host}:{port}.*give an address"):
        await serve_http(engine, host, port, ApiSettings(allow_anonymous=True))


async def test_the_same_port_serves_again(engine: Any) -> None:
    port = 0
    with trio.fail_after(300):
        async with trio.open_nursery() as clients:
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    host, port = await nursery.start(serve_http, engine, "127.0.0.1", port)
                    client = await clients.start(_open_client, f"http://{host}:{port}")
                    assert (await client.get("/health")).status_code == 200
                    nursery.cancel_scope.cancel()  # the server closes first: its end stays in TIME_WAIT
            clients.cancel_scope.cancel()
