"""Tokens of a text, and the text of tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from core.interfaces.engine import Conversation

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi"},
        {"model": "org/tiny", "prompt": "hi", "add_special_tokens": True},
        {"messages": MESSAGES, "add_generation_prompt": True, "add_special_tokens": False},
    ],
)
async def test_tokens_are_told_and_counted(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200
    assert response.json() == {"count": 2, "max_model_len": 4096, "tokens": [104, 105], "token_strs": None}


async def test_messages_reach_the_engine_as_a_conversation(
    client: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def tokenize(prompt: str | Conversation, client: str) -> tuple[int, ...]:
        asked.append(prompt)
        return ()

    monkeypatch.setattr(engine, "tokenize", tokenize)
    tool = {"type": "function", "function": {"name": "now", "strict": True}}
    told = {"type": "function", "function": {"name": "now", "description": "", "parameters": NO_PARAMETERS}}
    options = {"enable_thinking": False}
    await client.post("/tokenize", json={"messages": MESSAGES})
    await client.post("/tokenize", json={"messages": MESSAGES, "tools": [tool], "chat_template_kwargs": options})
    assert asked == [Conversation(tuple(MESSAGES)), Conversation(tuple(MESSAGES), (told,), options)]


async def test_text_comes_back(client: httpx.AsyncClient) -> None:
    response = await client.post("/detokenize", json={"tokens": [104, 105]})
    assert response.json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x" * (4 * 2**20 + 1)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_a_model_that_is_not_open_has_no_tokens(client: httpx.AsyncClient, engine: Any) -> None:
    engine.state = "loading"
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 503
