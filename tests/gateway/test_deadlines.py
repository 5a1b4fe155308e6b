"""How long a request may take: who says so, and what is answered when its time is up."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import trio

from core.errors import DeadlineExceeded
from core.gateway.answers.answer import in_time
from core.gateway.answers.completions import CompletionFormatter
from core.gateway.answers.generations import Step
from core.gateway.schemas.completions import CompletionBody
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Delta

ENDPOINTS = {
    "/v1/completions": {"model": "org/tiny", "prompt": "hi"},
    "/v1/chat/completions": {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "org/tiny", "input": "hi"},
}
UP = DeadlineExceeded("the request's time was up", "it was waiting for room", "try again later")
MORE_TIME = "allow it more time with 'max_time', within the server's --max-time"

every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)


@pytest.mark.parametrize(
    ("asked", "host", "bound"),
    [(None, math.inf, math.inf), (5, math.inf, 5), (None, 7.5, 7.5), (5, 7.5, 5), (9, 7.5, 7.5)],
)
@every_endpoint
async def test_a_request_is_bounded_from_its_arrival(
    engine: Any, nursery: trio.Nursery, path: str, asked: float | None, host: float, bound: float
) -> None:
    with trio.fail_after(300):
        address, port = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(max_time=host))
        async with httpx.AsyncClient(base_url=f"http://{address}:{port}") as client:
            before = trio.current_time()
            answer = await client.post(path, json={**ENDPOINTS[path], "max_time": asked})
            assert answer.status_code == 200
            (request,) = engine.requests
            assert before + bound <= request.deadline <= trio.current_time() + bound


@pytest.mark.parametrize("max_time", [0, -1, "5", True])
@every_endpoint
async def test_what_is_no_time_is_refused(client: httpx.AsyncClient, path: str, max_time: Any) -> None:
    answer = await client.post(path, json={**ENDPOINTS[path], "max_time": max_time})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_time")


@pytest.mark.parametrize("stream", [False, True])
@every_endpoint
async def test_before_it_is_admitted_it_is_an_http_error(
    client: httpx.AsyncClient, engine: Any, path: str, stream: bool
) -> None:
    engine.refusal = UP
    answer = await client.post(path, json={**ENDPOINTS[path], "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": f"the request's time was up: it was waiting for room (try again later, or {MORE_TIME})",
        "type": "deadline_exceeded",
        "param": None,
        "code": "deadline_exceeded",
    }


async def test_more_time_may_be_all_that_helps(client: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = DeadlineExceeded("the request's time was up", "3 tokens were decoded")
    answer = await client.post("/v1/completions", json=ENDPOINTS["/v1/completions"])
    assert answer.json()["error"]["message"] == f"the request's time was up: 3 tokens were decoded ({MORE_TIME})"


@every_endpoint
async def test_before_the_first_token_it_is_an_error(client: httpx.AsyncClient, engine: Any, path: str) -> None:
    engine.script = [UP]
    answer = await client.post(path, json=ENDPOINTS[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    streamed = await client.post(path, json={**ENDPOINTS[path], "stream": True})
    assert streamed.status_code == 200
    last = json.loads(streamed.text.split("\n\n")[-2].partition("data: ")[2])
    assert last.get("error", last.get("response", {}).get("error"))["code"] == "deadline_exceeded"


async def test_openais_client_does_not_send_it_again(address: tuple[str, int], engine: Any) -> None:
    def ask() -> None:
        url = f"http://{address[0]}:{address[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=2) as client:
            client.completions.create(model="org/tiny", prompt="x", extra_body={"max_time": 5})

    engine.refusal = UP
    with trio.fail_after(300), pytest.raises(openai.InternalServerError, match="waiting for room"):
        await trio.to_thread.run_sync(ask)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_there_is_is_the_answer(client: httpx.AsyncClient, engine: Any, path: str) -> None:
    engine.script = [Delta("Hello", 1), Delta(" wor", 2), UP]
    whole = (await client.post(path, json=ENDPOINTS[path])).json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert "Hello wor" in json.dumps(choice)
    assert whole["usage"]["completion_tokens"] == 2
    streamed = await client.post(path, json={**ENDPOINTS[path], "stream": True})
    *chunks, done = [frame.removeprefix("data: ") for frame in streamed.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert reasons.count("length") == 1


async def test_a_response_says_why_it_is_incomplete(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script = [Delta("Hello", 1), UP]
    asked = ENDPOINTS["/v1/responses"]
    whole = (await client.post("/v1/responses", json=asked)).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_time"})
    assert whole["output"][0]["content"][0]["text"] == "Hello"
    streamed = await client.post("/v1/responses", json={**asked, "stream": True})
    last = json.loads(streamed.text.split("\n\n")[-2].partition("data: ")[2])
    assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "max_time"})


async def test_a_call_that_is_cut_short_is_no_call(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = "{% if tools %}<tool_call>{% endif %}{{ messages }}"
    engine.script = [Delta('<tool_call>{"name": "f", "argu', 9), UP]
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = await client.post("/v1/chat/completions", json={**ENDPOINTS["/v1/chat/completions"], "tools": tools})
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


def cut(*steps: Step) -> AsyncIterator[Step]:
    """Those steps of two choices; then the time is up."""

    async def told() -> AsyncIterator[Step]:
        for step in steps:
            yield step
        raise UP

    formatter = CompletionFormatter("m", CompletionBody(model="m", prompt="hi", n=2), 2, [])
    return in_time(told(), 2, formatter)


async def test_each_choice_ends_that_has_not_ended(engine: Any) -> None:
    steps = [Step(0, engine, Delta("a", 1)), Step(1, engine, Delta("b", 3)), Step(0, engine, Delta("", 2, "stop"))]
    told = [step async for step in cut(*steps)]
    assert told == [*steps, Step(1, engine, Delta("", 3, "length"))]


async def test_a_choice_that_has_not_begun_fails_the_request(engine: Any) -> None:
    with pytest.raises(DeadlineExceeded, match="1 of its 2 choices had begun"):
        _ = [step async for step in cut(Step(0, engine, Delta("a", 1)))]
