"""Tools, thoughts and formats of chat completions, as the official client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from core.errors import RequestError
from core.interfaces.engine import Delta, Grammar

HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages }}"
LLAMA = "{% if tools %}<|python_tag|>{% endif %}{{ messages }}"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}{{ messages }}"
QWEN3 = HERMES + "{% if enable_thinking %}{% endif %}</think>"
USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [USER], "tools": [WEATHER, NOW]}


def says(engine: Any, text: str, finish_reason: Any = "stop", step: int = 3) -> None:
    """Three characters a token."""
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    engine.script = [Delta(piece, i, None) for i, piece in enumerate(pieces, 1)]
    engine.script.append(Delta("", len(pieces) + 1, finish_reason))


async def with_client(address: tuple[str, int], talk: Callable[[OpenAI], Any]) -> Any:
    def run() -> Any:
        with OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="-", max_retries=0) as client:
            return talk(client)

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(run)


async def test_a_call_is_answered_and_its_result_comes_back(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = HERMES
    says(engine, f"Let me look.\n{CALL}")

    def talk(client: OpenAI) -> Any:
        answer = client.chat.completions.create(**CHAT)
        said = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "22 C"}
        client.chat.completions.create(**{**CHAT, "messages": [USER, said, result]})
        return answer

    answer = await with_client(address, talk)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", '{"city": "Paris"}')
    first, second = engine.requests
    assert first.special_tokens
    assert first.grammar is None
    assert [tool["function"]["name"] for tool in first.prompt.tools] == ["get_weather", "now"]
    assert first.prompt.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert second.prompt.messages == (
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
                }
            ],
        },
        {"role": "tool", "name": "get_weather", "content": "22 C", "tool_call_id": call.id},
    )


async def test_calls_stream_name_first_and_then_arguments(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = HERMES
    says(engine, f'{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>')

    def talk(client: OpenAI) -> Any:
        chunks = list(client.chat.completions.create(**CHAT, stream=True))
        with client.chat.completions.stream(**CHAT) as stream:
            events = list(stream)
            return chunks, events, stream.get_final_completion()

    chunks, events, final = await with_client(address, talk)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    added = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in added if call.id] == [(0, "get_weather"), (1, "now")]
    assert len([call for call in added if call.index == 0]) > 3
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_text_without_calls_ends_as_ever(client: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    engine.chat_template = HERMES
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert '"finish_reason":"stop"' in response.text
    assert "tool_calls" not in response.text


async def test_a_call_that_is_cut_off_says_so(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = HERMES
    says(engine, CALL[: CALL.index("is")], "length")
    (choice,) = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


async def test_each_choice_has_calls_of_its_own(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = HERMES
    says(engine, CALL)
    choices = (await client.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("none", [], False),
        ("auto", ["get_weather", "now"], False),
        ("required", ["get_weather", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, ["now"], True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
            ["now"],
            False,
        ),
    ],
)
async def test_the_tool_choice_is_honoured(
    client: httpx.AsyncClient, engine: Any, choice: Any, names: list[str], forced: bool
) -> None:
    engine.chat_template = HERMES
    says(engine, '{"name": "now", "arguments": {}}\n</tool_call>' if forced else "Hello")
    response = await client.post("/v1/chat/completions", json={**CHAT, "tool_choice": choice})
    (asked,) = engine.requests
    assert [tool["function"]["name"] for tool in asked.prompt.tools] == names
    assert (asked.grammar is not None) == forced
    message = response.json()["choices"][0]["message"]
    assert ("tool_calls" in message) == forced
    if forced:
        assert asked.grammar.kind == "lark"
        assert all(name in asked.grammar.text for name in names)


async def test_no_more_than_one_call_where_they_may_not_be_parallel(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = HERMES
    says(engine, f"{CALL}\n{CALL}")
    body = {**CHAT, "parallel_tool_calls": False}
    (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_a_model_that_can_be_told_of_one_call_makes_one(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = LLAMA
    call = '{"name": "now", "parameters": {}}'
    says(engine, f"{call}; {call}")
    (choice,) = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["message"]["content"]) == (1, None)


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize(("template", "trigger"), [(HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]"), (LLAMA, "")])
async def test_strict_tools_are_held_to_their_schemas(
    address: tuple[str, int], engine: Any, template: str, trigger: str
) -> None:
    engine.chat_template = template
    says(
        engine, {HERMES: '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>'}.get(template, "")
    )

    def talk(client: OpenAI) -> Any:
        tools = [pydantic_function_tool(Weather)]
        return client.chat.completions.parse(model="org/tiny", messages=[USER], tools=tools)

    answer = await with_client(address, talk)
    grammar = engine.requests[0].grammar
    assert (grammar.kind, grammar.trigger) == ("lark", trigger)
    if template is HERMES:
        assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Rome")


async def test_an_answer_of_a_schema_is_parsed_by_the_client(address: tuple[str, int], engine: Any) -> None:
    says(engine, '{"city": "Rome"}')

    def talk(client: OpenAI) -> Any:
        ask: dict[str, Any] = {"model": "org/tiny", "messages": [USER], "response_format": Weather}
        whole = client.chat.completions.parse(**ask)
        with client.chat.completions.stream(**ask) as stream:
            return whole, stream.get_final_completion()

    for answer in await with_client(address, talk):
        assert answer.choices[0].message.parsed == Weather(city="Rome")
    for asked in engine.requests:
        assert asked.grammar.kind == "json_schema"
        assert json.loads(asked.grammar.text)["required"] == ["city"]
        assert not asked.special_tokens


async def test_any_json_object(client: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "org/tiny", "messages": [USER], "response_format": {"type": "json_object"}}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.requests[0].grammar == Grammar("json_object")


@pytest.mark.parametrize(
    ("prompt_end", "text"), [("", "<think>Hm, hm.</think>\n\nYes"), ("<think>\n", "Hm, hm.</think>Yes")]
)
async def test_thoughts_are_told_apart(client: httpx.AsyncClient, engine: Any, prompt_end: str, text: str) -> None:
    engine.chat_template, engine.opened = QWEN3, prompt_end
    says(engine, text, step=2)
    body = {"model": "org/tiny", "messages": [USER]}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, hm.", "Yes")
    thought = (text.index("</think>") + len("</think>") + 1) // 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    assert answer["usage"]["completion_tokens"] > thought

    streamed = await client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line and "[DONE]" not in line]
    added = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in added) == "Hm, hm."
    assert "".join(delta.get("content", "") for delta in added) == "Yes"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought


@pytest.mark.parametrize(
    ("prompt_end", "options", "trigger", "thoughts"),
    [("<think>\n", {}, "</think>", False), ("", {}, "", True), ("", {"enable_thinking": False}, "", False)],
)
async def test_a_format_is_that_of_the_answer_behind_the_thoughts(
    client: httpx.AsyncClient, engine: Any, prompt_end: str, options: dict[str, Any], trigger: str, thoughts: bool
) -> None:
    engine.chat_template, engine.opened = QWEN3, prompt_end
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}
    body = {"model": "org/tiny", "messages": [USER], "response_format": wanted, "chat_template_kwargs": options}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    (asked,) = engine.requests
    assert asked.grammar.trigger == trigger
    assert ("<think>" in asked.grammar.text) == thoughts
    assert asked.prompt.template_options == options


@pytest.mark.parametrize(("said", "thoughts"), [("hi", "Hm."), ("hi /no_think", None)])
async def test_whether_thoughts_are_open_is_read_off_the_request_s_own_prompt(
    client: httpx.AsyncClient, engine: Any, said: str, thoughts: str | None
) -> None:
    engine.chat_template, engine.opened = QWEN3, "<think>\n"
    says(engine, "Hm.</think>Yes" if thoughts else "Yes")
    messages = [{"role": "system", "content": said}, USER]
    answer = await client.post("/v1/chat/completions", json={"model": "org/tiny", "messages": messages})
    message = answer.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, "Yes")


async def test_a_template_of_its_own_for_tools_says_how_calls_are_written(
    client: httpx.AsyncClient, engine: Any
) -> None:
    engine.chat_template, engine.tool_template = "{{ messages }}", HERMES
    says(engine, CALL)
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    says(engine, CALL)
    answer = (await client.post("/v1/chat/completions", json={**CHAT, "tools": []})).json()
    assert answer["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("template", "effort", "options"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{{ messages }}", "none", {}),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", {"reasoning_effort": "none"}),
        (QWEN3, "none", {"enable_thinking": False}),
    ],
)
async def test_an_effort_is_told_to_templates_that_know_it(
    client: httpx.AsyncClient, engine: Any, template: str, effort: str, options: dict[str, Any]
) -> None:
    engine.chat_template = template
    body = {"model": "org/tiny", "messages": [USER], "reasoning_effort": effort}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.requests[0].prompt.template_options == options


FORMAT = {"type": "json_object"}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("", {}, "tools"),
        ("{{ messages }}", {}, "tools"),
        ("{{ tools }}<tool_call><function=f>", {}, "tools"),
        (HERMES, {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        (HERMES, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (HERMES, {"tools": [NOW, NOW]}, "tools[1]"),
        (HERMES, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (HERMES, {"tool_choice": "maybe"}, "tool_choice"),
        (HERMES, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        (LLAMA, {"response_format": FORMAT}, "response_format"),
        (HERMES, {"response_format": {"type": "xml"}}, "response_format.type"),
        (HERMES, {"response_format": BAD_SCHEMA}, "response_format.json_schema.schema"),
        (HERMES, {"reasoning_effort": "low"}, "reasoning_effort"),
        (HERMES, {"reasoning_effort": "immense"}, "reasoning_effort"),
        (
            QWEN3,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
        ),
        (HERMES, {"functions": [{"name": "f"}]}, "functions"),
        (HERMES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (HERMES, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ],
)
async def test_what_can_not_be_had_is_refused_by_name(
    client: httpx.AsyncClient, engine: Any, template: str, fields: dict[str, Any], param: str
) -> None:
    engine.chat_template = template
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert engine.requests == []


async def test_a_call_whose_arguments_are_no_object_is_told_as_it_was(client: httpx.AsyncClient, engine: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"cut'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."}
    result = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "?"}]}
    body = {"model": "org/tiny", "messages": [USER, said, result]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    told = engine.requests[0].prompt.messages
    assert told[1] == {**said, "content": ""}
    assert told[2] == {"role": "tool", "tool_call_id": "other", "content": "?"}


@pytest.mark.parametrize(
    ("fields", "told", "param"),
    [
        ({"tool_choice": "required"}, "grammar", "tools"),
        ({"response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ({"tools": [], "response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ({"tool_choice": "required"}, "prompt", "messages"),
        ({}, None, None),
    ],
)
async def test_a_grammar_that_the_engine_refuses_is_that_of_a_field(
    client: httpx.AsyncClient, engine: Any, fields: dict[str, Any], told: str | None, param: str | None
) -> None:
    engine.chat_template = HERMES
    engine.refusal = RequestError("the grammar can't be compiled", param=told)
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
