"""Grammars from the API to the tokens: a model of random weights calls functions and answers in JSON that fit.

The cluster is in one process, coordinator and node included; the official client asks it over a socket.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 300
HEAD = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
MESSAGES = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
PROMPT = "<|im_start|>assistant\n"
HERMES = f"{HEAD}{{# <tool_call> #}}{MESSAGES}{PROMPT}"
LLAMA = f"{HEAD}{{# <|python_tag|> #}}{MESSAGES}{PROMPT}"
MISTRAL = f"{HEAD}{{# [TOOL_CALLS] #}}{MESSAGES}{PROMPT}"
MISTRAL_NAMED = f"{HEAD}{{# [TOOL_CALLS]name[ARGS] #}}{MESSAGES}{PROMPT}"
NO_THOUGHTS = "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
THINKS = f"{MESSAGES}{PROMPT}<think>\n{NO_THOUGHTS}"
USER: Any = {"role": "user", "content": "hi"}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@asynccontextmanager
async def served(directory: Path, template: str) -> AsyncIterator[Callable[[Callable[[OpenAI], Any]], Any]]:
    model = tiny_checkpoint(directory, max_position_embeddings=2048)
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster, trio.open_nursery() as nursery:
            await cluster.ready()
            host, port = await nursery.start(serve_http, cluster.coordinator, "127.0.0.1", 0, ApiSettings())

            async def ask(talk: Callable[[OpenAI], Any]) -> Any:
                def run() -> Any:
                    with OpenAI(base_url=f"http://{host}:{port}/v1", api_key="-", max_retries=0) as client:
                        return talk(client)

                return await trio.to_thread.run_sync(run)

            yield ask
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED])
async def test_required_calls_fit_their_schema(tmp_path: Path, template: str) -> None:
    def talk(client: OpenAI) -> Any:
        tools = [pydantic_function_tool(Weather)]
        whole = client.chat.completions.parse(
            model="tiny", messages=[USER], tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1
        )
        with client.chat.completions.stream(
            model="tiny", messages=[USER], tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1
        ) as stream:
            return whole, stream.get_final_completion()

    async with served(tmp_path, template) as ask:
        whole, streamed = await ask(talk)
    for answer in (whole, streamed):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
    assert whole.choices[0].message.tool_calls[0].function == streamed.choices[0].message.tool_calls[0].function


async def test_answers_fit_their_schema_and_a_bad_one_is_named(tmp_path: Path) -> None:
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}

    def talk(client: OpenAI) -> Any:
        parsed = client.responses.parse(model="tiny", input="hi", text_format=Weather)
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="tiny", input="hi", text={"format": bad})
        faulty = {"type": "object", "properties": {"a": bad["schema"]}}
        tool = {"type": "function", "function": {"name": "f", "parameters": faulty}}
        with pytest.raises(BadRequestError) as called:
            client.chat.completions.create(model="tiny", messages=[USER], tools=[tool], tool_choice="required")
        return parsed, caught.value, called.value

    async with served(tmp_path, HERMES) as ask:
        parsed, of_format, of_tools = await ask(talk)
    assert isinstance(parsed.output_parsed, Weather)
    assert (of_format.param, of_tools.param) == ("text.format", "tools")
    assert "JSON schema of tool 'f' can't be enforced: at /properties/a: " in of_tools.message
    assert "start:" not in of_tools.message


LOOSE: list[Any] = [{}, {"type": ["object", "null"]}, {"anyOf": [{"type": "object"}, {"type": "null"}]}, None]


@pytest.mark.parametrize("template", [HERMES, MISTRAL_NAMED])
async def test_a_function_that_is_named_is_called_once_with_an_object(tmp_path: Path, template: str) -> None:
    """Whatever its schema would allow; what is said of no property is none."""

    def talk(client: OpenAI) -> Any:
        answers = []
        for seed, parameters in enumerate([*LOOSE, {"properties": {"a": {"const": 1}}, "required": ["a"]}]):
            tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            choice: Any = {"type": "function", "function": {"name": "f"}}
            ask: dict[str, Any] = {"messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 100}
            answers.append(client.chat.completions.create(model="tiny", seed=seed, temperature=2, **ask))
        return answers

    async with served(tmp_path, template) as ask:
        *loose, closed = [answer.choices[0] for answer in await ask(talk)]
    for choice in (*loose, closed):
        assert len(choice.message.tool_calls) == 1
        if choice.finish_reason == "tool_calls":
            assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)
        else:
            assert choice.message.tool_calls[0].function.arguments.startswith("{")
    assert json.loads(closed.message.tool_calls[0].function.arguments) == {"a": 1}


async def test_a_call_that_is_cut_leaks_no_markup(tmp_path: Path) -> None:
    def talk(client: OpenAI) -> Any:
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        ask: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [tool], "tool_choice": "required"}
        return [client.chat.completions.create(**ask, seed=1, max_tokens=length) for length in range(1, 12)]

    async with served(tmp_path, HERMES) as ask:
        answers = [answer.choices[0] for answer in await ask(talk)]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert [answer.message.content for answer in answers if answer.message.content] == []


async def test_a_prompt_that_opens_thoughts_is_answered_with_them(tmp_path: Path) -> None:
    def talk(client: OpenAI) -> Any:
        ask: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 20, "seed": 3}
        thinking = client.chat.completions.create(**ask)
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        plain = client.chat.completions.create(**ask, extra_body=options)
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(**ask, extra_body={"chat_template_kwargs": {"colour": "red"}})
        return thinking, plain, caught.value.param

    async with served(tmp_path, THINKS) as ask:
        thinking, plain, refused = await ask(talk)
    assert thinking.choices[0].message.reasoning_content
    assert thinking.choices[0].message.content == ""
    assert thinking.usage.completion_tokens_details.reasoning_tokens == thinking.usage.completion_tokens
    assert plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    assert refused == "chat_template_kwargs"
