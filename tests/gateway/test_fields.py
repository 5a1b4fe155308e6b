"""What the engine refuses by its own name of a field is refused by the endpoint's."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from core.errors import RequestError
from core.interfaces.engine import Conversation, Delta

CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "org/tiny", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "org/tiny", "input": "hi"}
OBJECT = {"type": "json_object"}

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "field", "named"),
    [
        (COMPLETIONS, COMPLETION, "prompt", "prompt"),
        (COMPLETIONS, COMPLETION, "max_tokens", "max_tokens"),
        (COMPLETIONS, COMPLETION, "prompt_logprobs", "logprobs"),
        (COMPLETIONS, COMPLETION, "stop_token_ids", "stop_token_ids"),
        (COMPLETIONS, COMPLETION, "deadline", "max_time"),
        (COMPLETIONS, COMPLETION, None, None),
        (CHATS, CHAT, "prompt", "messages"),
        (CHATS, CHAT, "tools", "tools"),
        (CHATS, CHAT, "template_options", "chat_template_kwargs"),
        (CHATS, {**CHAT, "max_tokens": 5}, "max_tokens", "max_tokens"),
        (CHATS, {**CHAT, "max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        (CHATS, CHAT, "logit_bias", "logit_bias"),
        (CHATS, {**CHAT, "response_format": OBJECT}, "grammar", "response_format"),
        (CHATS, CHAT, None, None),
        (RESPONSES, RESPONSE, "prompt", "input"),
        (RESPONSES, RESPONSE, "max_tokens", "max_output_tokens"),
        (RESPONSES, {**RESPONSE, "text": {"format": OBJECT}}, "grammar", "text.format"),
        (RESPONSES, RESPONSE, "deadline", "max_time"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_generation(
    client: httpx.AsyncClient,
    engine: Any,
    path: str,
    body: dict[str, Any],
    field: str | None,
    named: str | None,
    stream: bool,
) -> None:
    engine.refusal = RequestError("it can't be had", "this is why", "leave it out", param=field, code="a_code")
    response = await client.post(path, json={**body, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (named, "a_code")
    assert error["message"] == "it can't be had: this is why (leave it out)"


async def test_of_a_choice_that_is_refused_when_others_have_begun(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script = [Delta("Hello", 1), RequestError("too long", param="prompt")]
    response = await client.post(CHATS, json={**CHAT, "stream": True})
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "field", "named"),
    [
        ({"prompt": "hi"}, "prompt", "prompt"),
        ({"messages": CHAT["messages"]}, "prompt", "messages"),
        ({"messages": CHAT["messages"]}, "template_options", "chat_template_kwargs"),
        ({"messages": CHAT["messages"]}, "tools", "tools"),
    ],
)
async def test_of_a_prompt_that_is_tokenized(
    client: httpx.AsyncClient,
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    field: str,
    named: str,
) -> None:
    async def refuse(prompt: str | Conversation, client: str = "") -> tuple[int, ...]:
        raise RequestError("it can't be had", param=field)

    monkeypatch.setattr(engine, "tokenize", refuse)
    response = await client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


async def test_of_an_option_of_a_template_that_thinks(
    client: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(conversation: Conversation, client: str = "") -> str:
        raise RequestError("there is no option 'colour'", param="template_options")

    engine.chat_template = "<think>"
    monkeypatch.setattr(engine, "prompt_end", refuse)
    response = await client.post(CHATS, json={**CHAT, "chat_template_kwargs": {"colour": "red"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(("path", "body", "named"), [(CHATS, CHAT, "messages"), (RESPONSES, RESPONSE, "input")])
async def test_a_model_without_a_chat_template_points_to_completions(
    client: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any], named: str
) -> None:
    engine.chat_template = None
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, named)
    assert "/v1/completions" in error["message"]
    assert engine.requests == []


async def test_a_fields_name_is_not_searched_for_ever_nor_told_back_whole(client: httpx.AsyncClient) -> None:
    name = " - at `$" * 20_000
    response = await client.post(CHATS, json={**CHAT, name: 1})
    assert response.status_code == 400
    assert len(response.text) < 5000
