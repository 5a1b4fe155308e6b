"""Every failure in the API's error shape, before a stream and within one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import trio

from core.errors import CoreError, NotReady, Overloaded, RequestError, RouteError

COMPLETION = {"model": "org/tiny", "prompt": "hi"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "message"),
    [
        (
            NotReady("not ready", "a node is missing", required=3, ready=1),
            503,
            "cluster_not_ready",
            "Model is not ready. Required nodes: 3, connected ready nodes: 1. a node is missing. Try again later.",
        ),
        (
            NotReady("not ready", required=2, ready=0),
            503,
            "cluster_not_ready",
            "Model is not ready. Required nodes: 2, connected ready nodes: 0",
        ),
        (
            RouteError("the route broke", "n left", "wait", node="n7", layers="[4, 8)"),
            503,
            "route_lost",
            "the route broke: n left (wait) (node n7, layers [4, 8))",
        ),
        (
            RouteError("n7 with [4, 8) left", node="n7", layers="[4, 8)"),
            503,
            "route_lost",
            "n7 with [4, 8) left. Send the request again.",
        ),
        (RequestError("too long", "9 > 8", param="prompt"), 400, "invalid_request_error", "too long: 9 > 8"),
        (Overloaded("64 sessions run", "no more", "wait"), 429, "overloaded", "64 sessions run: no more (wait)"),
        (CoreError("no room", "in KV", "wait"), 500, "server_error", "no room: in KV (wait)"),
        (
            ValueError("a secret"),
            500,
            "server_error",
            "The server had an error while processing the request.",
        ),
    ],
)
async def test_what_refuses_a_generation_is_an_http_error(
    client: httpx.AsyncClient,
    engine: Any,
    stream: bool,
    refusal: Exception,
    status: int,
    kind: str,
    message: str,
) -> None:
    engine.refusal = refusal
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["type"], error["message"]) == (status, kind, message)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_request_error_keeps_param_and_code(client: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = RequestError("too long", param="prompt", code="context_length_exceeded")
    error = error_of(await client.post("/v1/completions", json=COMPLETION))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def test_an_unexpected_error_is_logged(
    client: httpx.AsyncClient, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = ValueError("a secret")
    await client.post("/v1/completions", json=COMPLETION)
    assert "a secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RouteError("the route broke", node="n7", layers="[4, 8)"), "route_lost", "node n7, layers [4, 8)"),
        (ValueError("a secret"), "server_error", "The server had an error while processing the request."),
    ],
)
async def test_an_error_in_mid_stream_is_its_last_event(
    client: httpx.AsyncClient, engine: Any, error: Exception, kind: str, said: str
) -> None:
    engine.script[1:] = [error]
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert response.status_code == 200
    first, last, end = response.text.split("\n\n")
    assert end == ""
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "Hello"
    told = json.loads(last.removeprefix("data: "))["error"]
    assert told["type"] == kind
    assert said in told["message"]
    with trio.fail_after(300):
        await engine.until(lambda e: e.sessions == 0)


async def test_an_error_in_mid_answer_is_an_http_error(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script[1:] = [RouteError("the route broke", node="n7", layers="[4, 8)")]
    response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 503
    assert error_of(response)["type"] == "route_lost"


async def test_the_official_client_sees_both_kinds(address: tuple[str, int], engine: Any) -> None:
    def ask() -> None:
        url = f"http://{address[0]}:{address[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            for _ in client.completions.create(model="org/tiny", prompt="x", stream=True):
                pass

    engine.script[1:] = [RouteError("the route broke", node="n7")]
    with trio.fail_after(300):
        with pytest.raises(openai.APIError, match="n7") as mid_stream:
            await trio.to_thread.run_sync(ask)
        assert mid_stream.value.code == "route_lost"
        engine.refusal = NotReady("not ready", required=3, ready=1)
        with pytest.raises(openai.InternalServerError, match="Required nodes: 3, connected ready nodes: 1"):
            await trio.to_thread.run_sync(ask)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "said"),
    [
        ("GET", "/nowhere", {}, 404, "/nowhere"),
        ("GET", "/v1/completions", {}, 405, "GET /v1/completions"),
        ("DELETE", "/v1/models", {}, 405, "DELETE /v1/models"),
        ("POST", "/v1/completions", {"content": b"{"}, 400, "not valid JSON"),
        ("POST", "/v1/completions", {"data": {"prompt": "x"}}, 415, "application/json"),
        ("POST", "/v1/completions", {"content": b" " * (10 * 1024 * 1024 + 1)}, 413, "Too Large"),
        ("POST", "/v1/completions", {"json": {**COMPLETION, "model": "other"}}, 404, "org/tiny"),
        ("GET", "/v1/models/other", {}, 404, "org/tiny"),
        ("GET", "/health", {"headers": {"host": "a b"}}, 400, "host"),
    ],
)
async def test_the_frameworks_errors_have_the_same_shape(
    client: httpx.AsyncClient, method: str, path: str, options: dict[str, Any], status: int, said: str
) -> None:
    response = await client.request(method, path, **options)
    assert response.status_code == status
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


async def test_a_body_that_never_says_its_size_is_cut_at_the_limit(client: httpx.AsyncClient) -> None:
    async def body() -> Any:
        for _ in range(11):
            yield b" " * 1024 * 1024

    response = await client.post("/v1/completions", content=body())
    assert response.status_code == 413
    error_of(response)


async def test_another_model_is_not_found(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/v1/completions", json={**COMPLETION, "model": "other"}))
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_an_engine_that_cannot_tell_its_state_is_a_500(
    client: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(engine, "status", fail)
    response = await client.get("/v1/cluster")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
