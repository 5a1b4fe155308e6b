"""`/v1/responses`, whole and streamed, by the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from core.errors import RouteError
from core.interfaces.engine import Delta

QWEN3 = "{% if tools %}<tool_call>{% endif %}{{ messages }}{% if enable_thinking %}{% endif %}</think>"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
THOUGHT = "<think>Paris, then.</think>\n\n"
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
)
ASK: dict[str, Any] = {"model": "org/tiny", "input": "hi"}


class Weather(BaseModel):
    city: str


def says(engine: Any, text: str, finish_reason: Any = "stop") -> None:
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    engine.script = [Delta(piece, i, None) for i, piece in enumerate(pieces, 1)]
    engine.script.append(Delta("", len(pieces) + 1, finish_reason))


async def with_client(address: tuple[str, int], talk: Callable[[OpenAI], Any]) -> Any:
    def run() -> Any:
        with OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="-", max_retries=0) as client:
            return talk(client)

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(run)


def frames(text: str) -> list[dict[str, Any]]:
    events = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_text_is_answered(address: tuple[str, int], engine: Any) -> None:
    answer = await with_client(
        address,
        lambda client: client.responses.create(
            **ASK, instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9, metadata={"a": "b"}
        ),
    )
    assert answer.output_text == "Hello world"
    assert (answer.status, answer.object, answer.error, answer.incomplete_details) == (
        "completed",
        "response",
        None,
        None,
    )
    assert answer.id.startswith("resp_")
    assert answer.completed_at >= answer.created_at
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("Be brief.", 9, {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.text.format.type) == (0.5, 0.9, "text")
    assert answer.usage.to_dict() == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    (asked,) = engine.requests
    assert asked.prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    )
    assert (asked.max_tokens, asked.temperature, asked.top_p) == (9, 0.5, 0.9)


async def test_thoughts_and_calls_are_items(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)
    answer = await with_client(address, lambda client: client.responses.create(**ASK, tools=[WEATHER]))
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, paris, rome = answer.output
    assert reasoning.content[0].text == "Paris, then."
    assert message.content[0].text == "Both."
    assert (paris.name, paris.arguments, rome.arguments) == ("get_weather", '{"city": "Paris"}', '{"city": "Rome"}')
    assert len({paris.call_id, rome.call_id, paris.id, rome.id}) == 4
    assert answer.usage.output_tokens_details.reasoning_tokens > 3
    assert answer.tools[0].name == "get_weather"


async def test_items_of_a_response_may_be_sent_back(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)

    def talk(client: OpenAI) -> Any:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        first = client.responses.create(model="org/tiny", input=asked, tools=[WEATHER])
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "22 C"} for call in calls]
        client.responses.create(model="org/tiny", input=[*asked, *first.output, *results], tools=[WEATHER])
        dumped = [item.model_dump() for item in first.output]
        client.responses.create(model="org/tiny", input=[*asked, *dumped, *results], tools=[WEATHER])
        return calls

    calls = await with_client(address, talk)
    _, second, third = engine.requests
    assert second.prompt == third.prompt
    user, said, *told = second.prompt.messages
    assert user == {"role": "user", "content": "hi"}
    assert (said["role"], said["content"], said["reasoning_content"]) == ("assistant", "Both.", "Paris, then.")
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert told == [
        {"role": "tool", "name": "get_weather", "tool_call_id": call.call_id, "content": "22 C"} for call in calls
    ]


async def test_a_stream_tells_of_every_item(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)

    def talk(client: OpenAI) -> Any:
        raw = list(client.responses.create(**ASK, tools=[WEATHER], stream=True))
        with client.responses.stream(**ASK, tools=[WEATHER]) as stream:
            helped = list(stream)
            return raw, helped, stream.get_final_response()

    raw, helped, final = await with_client(address, talk)
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    kinds = [event.type for event in raw if not event.type.endswith(".delta")]
    text_item = ["response.output_item.added", "response.content_part.added"]
    text_done = ["response.content_part.done", "response.output_item.done"]
    call = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        *text_item,
        "response.reasoning_text.done",
        *text_done,
        *text_item,
        "response.output_text.done",
        *text_done,
        *call,
        *call,
        "response.completed",
    ]
    added = {event.output_index: event.item for event in raw if event.type == "response.output_item.added"}
    assert [item.status for item in added.values()] == ["in_progress"] * 4
    done = {event.output_index: event.item for event in raw if event.type == "response.output_item.done"}
    assert [item.status for item in done.values()] == ["completed"] * 4
    assert [(item.type, item.id) for item in done.values()] == [(item.type, item.id) for item in added.values()]
    arguments = "".join(
        event.delta
        for event in raw
        if event.type == "response.function_call_arguments.delta" and event.output_index == 3
    )
    assert arguments == '{"city": "Rome"}'
    assert raw[0].response.output == []
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "Both."
    assert helped[-1].type == "response.completed"


async def test_an_answer_of_a_schema_is_parsed_by_the_client(address: tuple[str, int], engine: Any) -> None:
    says(engine, '{"city": "Rome"}')

    def talk(client: OpenAI) -> Any:
        whole = client.responses.parse(**ASK, text_format=Weather)
        with client.responses.stream(**ASK, text_format=Weather) as stream:
            return whole, stream.get_final_response()

    for answer in await with_client(address, talk):
        assert answer.output_parsed == Weather(city="Rome")
        assert answer.text.format.name == "Weather"
    assert {request.grammar.kind for request in engine.requests} == {"json_schema"}


async def test_strict_tools_are_parsed_by_the_client(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>')
    tool = pydantic_function_tool(Weather)["function"]
    answer = await with_client(
        address, lambda client: client.responses.parse(**ASK, tools=[{"type": "function", **tool}])
    )
    assert answer.output[0].parsed_arguments == {"city": "Rome"}
    assert engine.requests[0].grammar.trigger == "<tool_call>"


async def test_what_is_cut_off_is_incomplete(address: tuple[str, int], engine: Any) -> None:
    says(engine, "Once upon", "length")

    def talk(client: OpenAI) -> Any:
        return client.responses.create(**ASK), list(client.responses.create(**ASK, stream=True))

    whole, events = await with_client(address, talk)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.completed_at is None
        assert (response.output[0].status, response.output_text) == ("incomplete", "Once upon")
    assert events[-1].type == "response.incomplete"


async def test_an_empty_answer_is_an_empty_message(address: tuple[str, int], engine: Any) -> None:
    says(engine, "")
    answer = await with_client(address, lambda client: client.responses.create(**ASK))
    assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "")]


async def test_a_stream_that_breaks_off_has_failed(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script = [Delta("Hel", 1), RouteError("the route broke", node="n1", layers="0-4")]
    *_, last = frames((await client.post("/v1/responses", json={**ASK, "stream": True})).text)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "route_lost"
    assert "n1" in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, False),
        ("none", False),
    ],
)
async def test_the_tool_choice_is_honoured(client: httpx.AsyncClient, engine: Any, choice: Any, forced: bool) -> None:
    engine.chat_template = QWEN3
    response = await client.post("/v1/responses", json={**ASK, "tools": [WEATHER], "tool_choice": choice})
    assert response.status_code == 200
    assert response.json()["tool_choice"] == choice
    assert (engine.requests[0].grammar is not None) == forced
    assert bool(engine.requests[0].prompt.tools) == (choice != "none")


async def test_an_effort_is_told_to_the_template(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = QWEN3
    response = await client.post("/v1/responses", json={**ASK, "reasoning": {"effort": "none", "summary": None}})
    assert response.json()["reasoning"] == {"effort": "none"}
    assert engine.requests[0].prompt.template_options == {"enable_thinking": False}


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient) -> None:
    idle = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "service_tier": "auto",
        "stream_options": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "prompt_cache_retention": "in_memory",
        "tools": [],
        "user": "me",
    }
    response = await client.post("/v1/responses", json={**ASK, **idle})
    assert response.status_code == 200
    assert response.json()["store"] is False


async def test_what_a_coding_agent_sends_is_taken(client: httpx.AsyncClient, engine: Any) -> None:
    """As Codex CLI 0.171 does: tools that can't be had are left out, and the response says which there are."""
    engine.chat_template = QWEN3
    hosted = [
        {"type": "namespace", "name": "agents", "description": "", "tools": [WEATHER]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    ]
    text, said = {"type": "input_text", "text": "hi"}, {"type": "output_text", "text": "Hello"}
    body = {
        "model": "org/tiny",
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": [text]},
            {"type": "message", "id": "msg_2", "role": "user", "content": [text]},
            {"type": "message", "role": "assistant", "phase": "final_answer", "content": [said]},
            {"type": "message", "role": "user", "content": [text]},
        ],
        "tools": [WEATHER, *hosted],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s", "turn": {"id": 1}},
    }
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert [tool["name"] for tool in response.json()["tools"]] == ["get_weather"]
    (asked,) = engine.requests
    assert [tool["function"]["name"] for tool in asked.prompt.tools] == ["get_weather"]
    assert [message["role"] for message in asked.prompt.messages] == ["developer", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": ["web_search"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "id": "r", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_can_not_be_had_is_refused_by_name(
    client: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/responses", json={**ASK, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert engine.requests == []
