"""Ollama's API, by its official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import ollama
import pytest
import trio

from core.errors import RouteError
from core.gateway.answers.generations import Outcome
from core.gateway.answers.ollama import OllamaFormatter
from core.gateway.dialects.reader import Reader
from core.interfaces.engine import Delta, Generation

QWEN3 = "{% if tools %}<tool_call>{% endif %}{{ messages }}{% if enable_thinking %}{% endif %}</think>"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
USER = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "org/tiny", "messages": [USER]}
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
)


def says(engine: Any, text: str, finish_reason: Any = "stop") -> None:
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    engine.script = [Delta(piece, i, None) for i, piece in enumerate(pieces, 1)]
    engine.script.append(Delta("", len(pieces) + 1, finish_reason))


async def with_client(address: tuple[str, int], talk: Callable[[ollama.Client], Any]) -> Any:
    def run() -> Any:
        return talk(ollama.Client(host=f"http://{address[0]}:{address[1]}"))

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(run)


async def test_a_chat_is_answered(address: tuple[str, int], engine: Any) -> None:
    options = {"temperature": 0.5, "num_predict": 9, "num_ctx": 2048, "repeat_penalty": 1.2, "stop": ["END"], "seed": 7}
    answer = await with_client(address, lambda client: client.chat(**ASK, options=options, keep_alive="5m"))
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello world")
    assert (answer.model, answer.done, answer.done_reason) == ("org/tiny", True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (5, 3)
    assert answer.total_duration >= answer.eval_duration > 0
    (asked,) = engine.requests
    assert asked.prompt.messages == (USER,)
    assert (asked.max_tokens, asked.temperature, asked.repetition_penalty) == (9, 0.5, 1.2)
    assert (asked.stop, asked.seed, asked.fits_context) == (("END",), 7, True)


async def test_a_stream_says_what_a_whole_answer_says(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, "<think>Hm.</think>\n\nBoth.\n" + CALLS)

    def talk(client: ollama.Client) -> Any:
        return client.chat(**ASK, tools=[WEATHER]), list(client.chat(**ASK, tools=[WEATHER], stream=True))

    whole, lines = await with_client(address, talk)
    told = [line.message for line in lines]
    assert "".join(message.content for message in told) == whole.message.content == "Both."
    assert "".join(message.thinking or "" for message in told) == whole.message.thinking == "Hm."
    calls = [call.function.arguments for message in told for call in message.tool_calls or ()]
    assert (
        calls == [call.function.arguments for call in whole.message.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    )
    assert [line.done for line in lines].index(True) == len(lines) - 1
    assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", whole.eval_count)


async def test_an_answer_may_be_sent_back_with_its_results(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3
    says(engine, CALLS)

    def talk(client: ollama.Client) -> None:
        first = client.chat(**ASK, tools=[WEATHER])
        results = [
            {"role": "tool", "tool_name": "get_weather", "content": "rain"},
            {"role": "tool", "content": "sun"},
        ]
        client.chat(model="org/tiny", messages=[USER, first.message, *results], tools=[WEATHER])

    await with_client(address, talk)
    _, said, rain, sun = engine.requests[1].prompt.messages
    paris, rome = said["tool_calls"]
    assert (paris["function"]["arguments"], rome["function"]["arguments"]) == ({"city": "Paris"}, {"city": "Rome"})
    assert (rain["name"], rain["tool_call_id"], rain["content"]) == ("get_weather", paris["id"], "rain")
    assert (sun["name"], sun["tool_call_id"], sun["content"]) == ("get_weather", rome["id"], "sun")


def test_times_are_those_of_the_prompt_and_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=1000)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    formatter = OllamaFormatter("org/tiny", Reader(), chats=False)
    deltas = [Delta("so", 1), Delta(" far", 2, "stop")]
    line = formatter.whole([Outcome(cast(Generation, SimpleNamespace(prompt_tokens=5)), deltas)])
    assert (line.prompt_eval_duration, line.eval_duration, line.total_duration) == (1000, 1000, 2000)


async def test_a_prompt_is_answered(address: tuple[str, int], engine: Any) -> None:
    def talk(client: ollama.Client) -> Any:
        raw = client.generate("org/tiny", "hi", raw=True)
        return raw, client.generate("org/tiny:latest", "hi", system="Be brief."), client.generate("org/tiny")

    raw, told, loaded = await with_client(address, talk)
    assert (raw.response, told.response) == ("Hello world", "Hello world")
    assert (loaded.response, loaded.done_reason) == ("", "load")
    assert engine.requests[0].prompt == "hi"
    assert engine.requests[1].prompt.messages == ({"role": "system", "content": "Be brief."}, USER)
    assert len(engine.requests) == 2


async def test_a_format_is_held_to_and_thinking_is_told(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template, engine.opened = QWEN3, "<think>\n"
    await with_client(address, lambda client: [client.chat(**ASK, format=wanted) for wanted in ("json", CITY)])
    assert [json.loads(asked.grammar.text)["properties"] for asked in engine.requests[1:]] == [CITY["properties"]]
    assert engine.requests[0].grammar is not None
    await with_client(address, lambda client: client.chat(**ASK, think=False))
    assert engine.requests[2].prompt.template_options == {"enable_thinking": False}


async def test_the_model_is_listed_and_shown(address: tuple[str, int], engine: Any) -> None:
    engine.chat_template = QWEN3

    def talk(client: ollama.Client) -> Any:
        return client.list(), client.ps(), client.show("org/tiny"), client.pull("org/tiny")

    listed, loaded, shown, pulled = await with_client(address, talk)
    assert [model.model for model in listed.models] == [model.model for model in loaded.models] == ["org/tiny"]
    assert (shown.template, shown.modelinfo["core.context_length"]) == (QWEN3, 4096)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert pulled.status == "success"
    engine.state = "loading"
    assert (await with_client(address, lambda client: client.ps())).models == []


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/api/chat", {**ASK, "model": "llama3"}, 404, "org/tiny"),
        ("/api/pull", {"model": "llama3"}, 404, "org/tiny"),
        ("/api/chat", {**ASK, "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {**ASK, "messages": [{**USER, "images": ["aGk="]}]}, 400, "images"),
        ("/api/generate", {"model": "org/tiny", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/embed", {"model": "org/tiny", "input": "a"}, 404, "embeddings"),
    ],
)
async def test_what_cannot_be_had_is_refused_in_their_words(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    refused = await client.post(path, json=body)
    assert refused.status_code == status
    assert named in refused.json()["error"]


async def test_a_stream_that_breaks_off_ends_with_an_error(address: tuple[str, int], engine: Any) -> None:
    engine.script = [Delta("so", 1), RouteError("node 'n1' was lost")]
    with pytest.raises(ollama.ResponseError, match="n1"):
        await with_client(address, lambda client: list(client.chat(**ASK, stream=True)))
