"""What HTTP allows and clients do: HEAD, gzip, directions that are closed early; and what is not served."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import trio

from core.gateway.bodies import BODY_LIMIT
from core.interfaces.engine import Delta

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
STREAM = {**COMPLETION, "stream": True}
PACKED = {"content-type": "application/json", "content-encoding": "gzip"}


def raw(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/org/tiny", "/metrics", "/openapi.json"])
async def test_head_is_get_without_the_body(
    client: httpx.AsyncClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    got, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_head_of_a_stream_ends(client: httpx.AsyncClient) -> None:
    head = await client.head("/v1/cluster/events")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


async def test_head_of_what_is_no_get_is_refused(client: httpx.AsyncClient, engine: Any) -> None:
    assert (await client.head("/v1/completions")).status_code == 405
    assert (await client.head("/nowhere")).status_code == 404


async def test_a_body_may_be_gzip(client: httpx.AsyncClient, engine: Any) -> None:
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    response = await client.post("/v1/completions", content=packed, headers=PACKED)
    assert response.json()["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("content", "encoding", "status", "told"),
    [
        (b"{}", "gzip", 400, "not gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400, "cut short"),
        (gzip.compress(b"{}", mtime=0) + b"{}", "gzip", 400, "behind its end"),
        (gzip.compress(b" " * (BODY_LIMIT + 1)), "gzip", 413, str(BODY_LIMIT)),
        (b"{}", "br", 415, "not as br"),
    ],
)
async def test_a_body_that_can_not_be_unpacked_is_refused(
    client: httpx.AsyncClient, content: bytes, encoding: str, status: int, told: str
) -> None:
    headers = {**PACKED, "content-encoding": encoding}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    assert told in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [COMPLETION, STREAM])
async def test_a_client_that_has_closed_its_direction_is_answered(
    address: tuple[str, int], engine: Any, fields: dict[str, Any]
) -> None:
    """It is probed while it waits, before or within its answer; the connection ends behind it."""
    going_on = trio.Event()
    engine.script = [Delta("Hello", 1), going_on, Delta(" world", 2, "stop")]
    probe = b": waiting" if "stream" in fields else b"HTTP/1.1 100 Continue"
    with trio.fail_after(300):
        async with await trio.open_tcp_stream(*address) as client:
            await client.send_all(raw(fields))
            await client.send_eof()
            seen = b""
            async for piece in client:
                seen += piece
                if probe in seen:
                    going_on.set()
    assert b"HTTP/1.1 200 OK" in seen
    assert b" world" in seen
    assert b"[DONE]" in seen or "stream" not in fields


async def test_a_request_that_is_cut_by_its_end_is_none(address: tuple[str, int], engine: Any) -> None:
    with trio.fail_after(300):
        async with await trio.open_tcp_stream(*address) as client:
            await client.send_all(raw(COMPLETION)[:-1])
            await client.send_eof()
            assert b"200 OK" not in b"".join([piece async for piece in client])
    assert engine.requests == []


async def test_embeddings_are_not_to_be_had(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"model": "org/tiny", "input": "hi"})
    assert response.status_code == 404
    assert "embedding" in response.json()["error"]["message"]
