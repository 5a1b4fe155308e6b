"""What a client sees when all is well: by raw HTTP, and by the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
from openai import OpenAI

from core.errors import RequestError

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "org/tiny", "prompt": "hi"}


def usage(prompt: int, completion: int, cached: int = 2) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def events(text: str) -> list[Any]:
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


async def test_a_chat_answer_has_the_official_shape(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert isinstance(answer["created"], int)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "org/tiny"
    assert answer["usage"] == usage(5, 3)
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello world"


async def test_a_completion_has_the_official_shape(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 8


async def test_ids_differ(client: httpx.AsyncClient) -> None:
    answers = [(await client.post("/v1/completions", json=COMPLETION)).json()["id"] for _ in range(2)]
    assert answers[0] != answers[1]


async def test_a_chat_stream_opens_with_the_role_and_ends_with_done(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "data: [DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


async def test_a_final_delta_without_text_still_carries_the_reason(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script = [type(engine.script[0])("x", 1), type(engine.script[0])("", 2, "length")]
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    final = events(response.text)[-2]["choices"][0]
    assert (final["delta"], final["finish_reason"]) == ({}, "length")


async def test_usage_comes_last_where_it_is_asked_for(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events((await client.post("/v1/completions", json=body)).text)
    assert done == "data: [DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == usage(5, 3)


async def test_a_chunk_leaves_when_its_delta_comes(client: httpx.AsyncClient, engine: Any) -> None:
    first_seen = trio.Event()
    engine.script.insert(1, first_seen)
    async with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
        seen = ""
        async for text in response.aiter_text():
            seen += text
            first_seen.set()
    assert len(events(seen)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_text_of_every_script_survives(client: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    pieces = ["né", "日本", "", "\u2028\u0085\r\n", "🦊", '"\\', "\0"]
    delta = type(engine.script[0])
    engine.script = [delta(text, i, "stop" if i == 6 else None) for i, text in enumerate(pieces)]
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    choices = [chunk["choices"][0] for chunk in events(response.text)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "".join(pieces)


async def test_the_official_client_is_served(address: tuple[str, int]) -> None:
    def talk() -> tuple[Any, ...]:
        with OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="-", max_retries=0) as openai:
            ask: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
            whole = openai.chat.completions.create(**ask)
            chunks = list(openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
            completion = openai.completions.create(model="org/tiny", prompt=[1, 2, 3])
            streamed = list(openai.completions.create(model="org/tiny", prompt="x", stream=True))
            return whole, chunks, completion, streamed, list(openai.models.list()), openai.models.retrieve("org/tiny")

    with trio.fail_after(300):
        whole, chunks, completion, streamed, models, model = await trio.to_thread.run_sync(talk)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.usage.total_tokens == 8
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "Hello world"
    assert chunks[-1].usage.completion_tokens == 3
    assert completion.choices[0].text == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in streamed] == [None, "stop"]
    assert models == [model]
    assert (model.id, model.created) == ("org/tiny", 1_700_000_000)


async def test_the_client_may_send_back_what_it_was_answered(address: tuple[str, int], engine: Any) -> None:
    def talk() -> None:
        with OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="-", max_retries=0) as openai:
            asked: Any = {"role": "user", "content": "hi"}
            answer = openai.chat.completions.create(model="org/tiny", messages=[asked])
            said: Any = answer.choices[0].message.model_dump()
            openai.chat.completions.create(model="org/tiny", messages=[asked, said, asked])

    with trio.fail_after(300):
        await trio.to_thread.run_sync(talk)
    assert [message["role"] for message in engine.requests[1].prompt.messages] == ["user", "assistant", "user"]


async def test_an_answer_may_have_several_choices(client: httpx.AsyncClient, engine: Any) -> None:
    answer = (await client.post("/v1/chat/completions", json={**CHAT, "n": 3, "seed": 7})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hello world"}
    assert answer["usage"] == usage(5, 9)
    assert sorted(request.seed for request in engine.requests) == [7, 8, 9]


async def test_choices_stream_side_by_side(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events((await client.post("/v1/chat/completions", json=body)).text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert last["usage"]["completion_tokens"] == 6


async def test_what_refuses_one_of_several_choices_refuses_the_request(client: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = RequestError("too long", param="prompt")
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json={**CHAT, "n": 4, "stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert engine.sessions == 0


async def test_several_prompts_have_choices_each(client: httpx.AsyncClient, engine: Any) -> None:
    body = {**COMPLETION, "prompt": [[1], [2], [3]], "n": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"] == usage(15, 18, cached=6)
    assert sorted(request.prompt for request in engine.requests) == [(1,), (1,), (2,), (2,), (3,), (3,)]


async def test_more_generations_than_run_at_once_take_turns(client: httpx.AsyncClient, engine: Any) -> None:
    for stream in (False, True):
        response = await client.post("/v1/completions", json={**COMPLETION, "prompt": ["x"] * 40, "stream": stream})
        assert response.status_code == 200
    assert len(engine.requests) == 80
    assert engine.most == 16


async def test_the_models_context_is_told_once_it_is_open(client: httpx.AsyncClient, engine: Any) -> None:
    card = (await client.get("/v1/models/org/tiny")).json()
    assert card["max_model_len"] == 4096
    engine.state = "loading"
    models = (await client.get("/v1/models")).json()
    assert models["data"] == [card | {"max_model_len": None}]


async def test_health_says_what_the_cluster_waits_for(client: httpx.AsyncClient, engine: Any) -> None:
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    engine.state = "waiting"
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json() == {
        "status": "waiting",
        "detail": "waiting for two nodes",
        "required_nodes": 3,
        "ready_nodes": 1,
    }


async def test_the_cluster_is_shown(client: httpx.AsyncClient, engine: Any) -> None:
    engine.left_out = {"n2": "too small"}
    status = (await client.get("/v1/cluster")).json()
    assert status["state"] == "ready"
    assert status["nodes"][0]["layers"] == [0, 4]
    assert status["left_out"] == {"n2": "too small"}
