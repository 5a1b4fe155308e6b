"""What clients that people use send of themselves, before anyone sets anything: none of it is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages }}"
SYSTEM = {"role": "system", "content": "You help."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "$schema": "http://json-schema.org/x"}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "22 C"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def turn(*answers: dict[str, Any], question: Any = "hi") -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": question}, *answers]


def called(**fields: Any) -> list[dict[str, Any]]:
    return turn({"role": "assistant", "tool_calls": [CALL], **fields}, RESULT)


SENT: dict[str, dict[str, Any]] = {
    "openai for Python, with its own answer sent back": {
        "messages": called(content=None, refusal=None, annotations=None, audio=None, function_call=None),
        "tools": [TOOL],
    },
    "openai for JavaScript": {"messages": turn({"role": "assistant", "content": "x", "refusal": None}), **STREAM},
    "LangChain": {"messages": called(content=""), "tools": [TOOL], "temperature": 0.7, "n": 1, "stream": False},
    "LangChain, an answer of a given form": {
        "messages": turn(),
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "Open WebUI": {"messages": turn(), "tools": [], **STREAM},
    "Open WebUI, a call gathered from a stream": {
        "messages": called(content="", tool_calls=[{"index": 0, **CALL}]),
        "tools": [TOOL],
        **STREAM,
    },
    "Open WebUI, a chat's title": {"messages": turn(), "stream": False, "max_completion_tokens": 1000},
    "Continue": {"messages": called(content=" "), "tools": [TOOL], "max_tokens": 4096, "stop": ["</s>"], **STREAM},
    "Cline": {
        "messages": turn(question=[{"type": "text", "text": "<task>hi</task>"}, {"type": "text", "text": "<env>"}]),
        "temperature": 0,
        **STREAM,
    },
    "Cline, with tools": {
        "messages": called(content=None),
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "temperature": 0,
        **STREAM,
    },
    "LibreChat": {
        "messages": turn(question=[{"type": "text", "text": "hi"}]),
        "user": "65f0c0ffee",
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        **STREAM,
    },
    "Zed": {
        "messages": called(content=None, reasoning_content="Rome, then."),
        "temperature": 1.0,
        "max_completion_tokens": 4096,
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "thread",
        **STREAM,
    },
    "aider": {"messages": turn({"role": "assistant", "content": "Ok."}), "temperature": 0, "stream": True},
    "the AI SDK": {
        "messages": called(content=None, reasoning_content=""),
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_tokens": None,
        "stream": True,
    },
}


@pytest.mark.parametrize("client_", SENT)
async def test_what_a_client_sends_is_taken(client: httpx.AsyncClient, engine: Any, client_: str) -> None:
    engine.chat_template = HERMES
    response = await client.post("/v1/chat/completions", json={"model": "org/tiny", **SENT[client_]})
    assert response.status_code == 200, response.text
    (asked,) = engine.requests
    messages = SENT[client_]["messages"]
    assert [message["role"] for message in asked.prompt.messages] == [message["role"] for message in messages]
    for message, given in zip(asked.prompt.messages, messages, strict=True):
        assert len(message.get("tool_calls", ())) == len(given.get("tool_calls", ()))


RESPONSES: dict[str, dict[str, Any]] = {
    "openai's agents": {
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "You help.",
        "include": [],
        "tools": [{"type": "function", "strict": True, **FUNCTION, "parameters": {**PARAMETERS, "required": ["city"]}}],
        "parallel_tool_calls": None,
        "store": None,
        "text": None,
    },
    "Codex": {
        "instructions": "You help.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "thread",
    },
    "Zed": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "22 C"},
        ],
        "store": False,
        "stream": True,
        "temperature": 1.0,
        "tools": [{"type": "function", **FUNCTION, "strict": None}],
        "prompt_cache_key": "thread",
    },
}


@pytest.mark.parametrize("client_", RESPONSES)
async def test_what_a_client_sends_for_a_response_is_taken(
    client: httpx.AsyncClient, engine: Any, client_: str
) -> None:
    engine.chat_template = HERMES
    response = await client.post("/v1/responses", json={"model": "org/tiny", **RESPONSES[client_]})
    assert response.status_code == 200, response.text
