"""Models whose chat template has no place for tools, or writes calls in a form that it doesn't tell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from core.gateway.dialects.as_text import as_text
from core.gateway.dialects.forms import ToolFormat, ToolSettings
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Conversation, Delta

PLAIN = "{{ messages }}"
UNTOLD = "{{ tools }}{{ messages }}"
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
NOW = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CALLED: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "é"}}}
CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [USER], "tools": [NOW]}


@asynccontextmanager
async def asking(engine: Any, nursery: trio.Nursery, **tools: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings(tools=ToolSettings(**tools))
    with trio.fail_after(300):
        host, port = await nursery.start(serve_http, engine, "127.0.0.1", 0, settings)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=300) as client:
            yield client


def test_tools_calls_and_results_are_text() -> None:
    messages = (
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Look:", "tool_calls": [CALLED, CALLED], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "13:00"},
        USER,
        {"role": "assistant", "content": "Noon."},
    )
    told = as_text(Conversation(messages, tools=(NOW,)))
    assert told.tools == ()
    system, first, calls, results, last = told.messages
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(NOW) in system["content"]
    assert '<tool_call>\n{"name": <function-name>' in system["content"]
    assert first == USER
    assert calls == {"role": "assistant", "content": f"Look:\n{CALL}\n{CALL}", "reasoning_content": "Hm."}
    answers = [f"<tool_response>\n{time}\n</tool_response>" for time in ("12:00", "13:00")]
    assert results["role"] == "user"
    assert results["content"] == "\n".join([*answers, "hi"])
    assert last == {"role": "assistant", "content": "Noon."}


def test_what_has_no_tools_is_left_as_it_is() -> None:
    conversation = Conversation((USER, {"role": "assistant", "content": ""}, USER), continues_last=True)
    assert as_text(conversation) == conversation


async def test_a_template_without_tools_gets_them_as_text(engine: Any, nursery: trio.Nursery) -> None:
    engine.chat_template, engine.script = PLAIN, [Delta(CALL, 1, "stop")]
    async with asking(engine, nursery, as_text=True) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"zone": "é"}
        counted = await client.post("/tokenize", json={"messages": [USER], "tools": [NOW]})
    (asked,) = engine.requests
    system, user = asked.prompt.messages
    assert (system["role"], user, asked.prompt.tools) == ("system", USER, ())
    assert '"name": "now"' in system["content"]
    assert counted.json()["count"] == len((system["content"] + "hi").encode())


async def test_a_template_with_tools_gets_them_as_tools(engine: Any, nursery: trio.Nursery) -> None:
    engine.chat_template = "{{ tools }}<tool_call>{{ messages }}"
    async with asking(engine, nursery, as_text=True) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    (asked,) = engine.requests
    assert (asked.prompt.messages, len(asked.prompt.tools)) == ((USER,), 1)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.HERMES, CALL),
        (ToolFormat.LLAMA, '{"name": "now", "parameters": {"zone": "é"}}'),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "é"}}]'),
    ],
)
async def test_the_host_tells_the_form_of_calls(
    engine: Any, nursery: trio.Nursery, form: ToolFormat, text: str
) -> None:
    engine.chat_template, engine.script = UNTOLD, [Delta(text, 1, "stop")]
    async with asking(engine, nursery, format=form) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"zone": "é"}


@pytest.mark.parametrize(("template", "tools"), [(PLAIN, {}), (UNTOLD, {}), (PLAIN, {"format": ToolFormat.HERMES})])
async def test_who_asks_in_vain_is_told_what_the_host_can_do(
    engine: Any, nursery: trio.Nursery, template: str, tools: dict[str, Any]
) -> None:
    engine.chat_template = template
    async with asking(engine, nursery, **tools) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert all(option in error["message"] for option in ("--chat-template", "--tool-format", "--tools-as-text"))
