"""Anthropic's `/v1/messages`, whole and streamed, by its official client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
import trio
from anthropic import Anthropic

from core.errors import Overloaded, RouteError
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Delta

QWEN3 = "{% if tools %}<tool_call>{% endif %}{{ messages }}{% if enable_thinking %}{% endif %}</think>"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "input_schema": CITY, "description": "Of a city."}
THOUGHT = "<think>Paris, then.</think>\n\n"
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
)
ASK: dict[str, Any] = {"model": "org/tiny", "max_tokens": 90, "messages": [{"role": "user", "content": "hi"}]}


def says(engine: Any, text: str, finish_reason: Any = "stop", stop: str = "") -> None:
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    engine.script = [Delta(piece, i, None) for i, piece in enumerate(pieces, 1)]
    engine.script.append(Delta("", len(pieces) + 1, finish_reason, (), stop))


async def with_client(address: tuple[str, int], talk: Callable[[Anthropic], Any], key: str = "-") -> Any:
    def run() -> Any:
        with Anthropic(base_url=f"http://{address[0]}:{address[1]}", api_key=key, max_retries=0) as client:
            return talk(client)

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(run)


async def test_a_text_is_answered(address: tuple[str, int], engine: Any) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}  # not in every version of the client
    given: dict[str, Any] = {"system": "Be brief.", "stop_sequences": ["END"], "extra_body": sampling}
    answer = await with_client(address, lambda client: client.messages.create(**ASK, **given))
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "org/tiny")
    assert [block.text for block in answer.content] == ["Hello world"]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 3)
    (asked,) = engine.requests
    assert asked.prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (90, 0.5, 0.9, 7)
    assert (asked.stop, asked.fits_context) == (("END",), True)


async def test_thoughts_and_calls_are_blocks(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)
    answer = await with_client(address, lambda client: client.messages.create(**ASK, tools=[WEATHER]))
    thinking, text, paris, rome = answer.content
    assert (thinking.thinking, text.text) == ("Paris, then.", "Both.")
    assert [(call.type, call.name, call.input) for call in (paris, rome)] == [
        ("tool_use", "get_weather", {"city": "Paris"}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    assert paris.id != rome.id
    assert answer.stop_reason == "tool_use"


async def test_a_stream_says_what_a_whole_answer_says(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)

    def talk(client: Anthropic) -> Any:
        whole = client.messages.create(**ASK, tools=[WEATHER])
        with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type for event in stream]
            return whole, stream.get_final_message(), kinds

    whole, streamed, kinds = await with_client(address, talk)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    without_ids = [{k: v for k, v in block.to_dict().items() if k != "id"} for block in streamed.content]
    assert without_ids == [{k: v for k, v in block.to_dict().items() if k != "id"} for block in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert streamed.usage.input_tokens == whole.usage.input_tokens == 3


async def test_an_answer_may_be_sent_back_with_its_results(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, THOUGHT + "Both.\n" + CALLS)

    def talk(client: Anthropic) -> None:
        first = client.messages.create(**ASK, tools=[WEATHER])
        paris, rome = (block.id for block in first.content if block.type == "tool_use")
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": paris, "content": [{"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": rome, "content": "no such city", "is_error": True},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ]
        history = [*ASK["messages"], {"role": "assistant", "content": first.content}]
        client.messages.create(**{**ASK, "messages": [*history, {"role": "user", "content": results}]}, tools=[WEATHER])

    await with_client(address, talk)
    _, said, rain, error, more = engine.requests[1].prompt.messages
    assert (said["content"], said["reasoning_content"]) == ("Both.", "Paris, then.")
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert (rain["role"], rain["name"], rain["content"]) == ("tool", "get_weather", "rain")
    assert (error["role"], error["content"]) == ("tool", "Error: no such city")
    assert more == {"role": "user", "content": "Go on."}


@pytest.mark.parametrize(
    ("finish", "tokens", "stop", "reason"),
    [
        ("length", 90, "", "max_tokens"),
        ("length", 40, "", "model_context_window_exceeded"),
        ("stop", 40, "END", "stop_sequence"),
    ],
)
async def test_the_reason_for_the_end_is_told(
    address: tuple[str, int], engine: Any, finish: Any, tokens: int, stop: str, reason: str
) -> None:
    engine.script = [Delta("so far", tokens, finish, (), stop)]
    answer = await with_client(address, lambda client: client.messages.create(**ASK))
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop or None)


async def test_an_assistants_last_message_is_gone_on_with(address: tuple[str, int], engine: Any) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    await with_client(address, lambda client: client.messages.create(**{**ASK, "messages": begun}))
    prompt = engine.requests[0].prompt
    assert (prompt.opens_answer, prompt.continues_last) == (False, True)


async def test_what_coding_agents_send_is_taken(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template, engine.opened = QWEN3, "<think>\n"
    body = {
        **ASK,
        "max_tokens": 32_000,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER | {"cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "web"}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "metadata": {"user_id": "somebody"},
        "service_tier": "auto",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    told = await client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert told.status_code == 200, told.text
    (asked,) = engine.requests
    assert [tool["function"]["name"] for tool in asked.prompt.tools] == ["get_weather"]
    assert asked.prompt.template_options == {"enable_thinking": True}


async def test_a_format_is_held_to(client: httpx.AsyncClient, engine: Any) -> None:
    body = {**ASK, "output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    assert engine.requests[0].grammar.kind == "json_schema"


async def test_tokens_are_counted(address: tuple[str, int], engine: Any) -> None:
    counted = await with_client(
        address, lambda client: client.messages.count_tokens(model="org/tiny", messages=ASK["messages"], system="Sum.")
    )
    assert counted.input_tokens == len("Sum.hi")


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "org/tiny"),
        ({"max_tokens": None}, anthropic.BadRequestError, "max_tokens"),
        ({"stop": ["x"]}, anthropic.BadRequestError, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "only text",
        ),
    ],
)
async def test_what_cannot_be_had_is_refused_in_their_words(
    address: tuple[str, int], change: dict[str, Any], kind: type[anthropic.APIStatusError], named: str
) -> None:
    def talk(client: Anthropic) -> None:
        client.post("/v1/messages", body={**ASK, **change}, cast_to=object)

    with pytest.raises(kind, match=named) as refused:
        await with_client(address, talk)
    assert refused.value.body["type"] == "error"  # type: ignore[index]


async def test_a_stream_that_breaks_off_ends_with_an_error(address: tuple[str, int], engine: Any) -> None:
    engine.script = [Delta("so", 1), RouteError("node 'n1' was lost")]

    def talk(client: Anthropic) -> None:
        with client.messages.stream(**ASK) as stream:
            for _ in stream:
                pass

    with pytest.raises(anthropic.APIStatusError, match="n1"):
        await with_client(address, talk)


async def test_too_much_at_once_is_a_rate_limit(address: tuple[str, int], engine: Any) -> None:
    engine.refusal = Overloaded("256 requests are waiting")
    with pytest.raises(anthropic.RateLimitError, match="256"):
        await with_client(address, lambda client: client.messages.create(**ASK))


class TestWithAKey:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"secret"}))

    async def test_the_key_is_taken_from_either_header(self, client: httpx.AsyncClient) -> None:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await client.post("/v1/messages", json=ASK, headers=headers)).status_code == 200
        refused = await client.post("/v1/messages", json=ASK, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
