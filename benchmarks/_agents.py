"""Programs of Python that call a function: each asks for a call, runs it, and gets an answer of its result.

As a program: `python _agents.py PROGRAM API MODEL REQUEST`, with the key in OPENAI_API_KEY, by a Python that has what
is asked for. It needs nothing of core, and fails where the answer isn't as it should be.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

TOKENS = 60
calls: list[str] = []


def capital_of(country: str) -> str:
    """Tells the capital of a country.

    Args:
        country: Its name.
    """
    calls.append(country)
    return "Paris"


def openai_agents(api: str, model: str, request: str, kind: str) -> str:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api("chat_completions" if kind == "chat" else "responses")
    settings = ModelSettings(temperature=0, max_tokens=TOKENS)
    agent = Agent(name="a", model=model, tools=[function_tool(capital_of)], model_settings=settings)
    first = Runner.run_sync(agent, request, max_turns=3)
    if kind == "chat":
        return str(first.final_output)
    quiet = agent.clone(tools=[])
    more = Runner.run_sync(quiet, "Say it again.", previous_response_id=first.last_response_id, max_turns=2)
    assert more.final_output, "the second turn said nothing"
    return str(first.final_output)


def pydantic_ai(api: str, model: str, request: str, kind: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=api, api_key=os.environ["OPENAI_API_KEY"])
    models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    agent = Agent(models[kind](model, provider=provider), tools=[capital_of])
    settings: Any = {"temperature": 0, "max_tokens": TOKENS}
    first = agent.run_sync(request, model_settings=settings)
    more = agent.run_sync("Say it again.", message_history=first.all_messages(), model_settings=settings)
    assert more.output, "the second turn said nothing"
    return str(first.output)


def smolagents(api: str, model: str, request: str, kind: str) -> str:
    from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool

    options: Any = {"api_base": api, "api_key": os.environ["OPENAI_API_KEY"], "temperature": 0, "max_tokens": TOKENS}
    chat = OpenAIServerModel(model, **options)
    tools = [tool(capital_of)]
    asked = [ChatMessage(MessageRole.USER, [{"type": "text", "text": request}])]
    called = chat.generate(asked, tools_to_call_from=tools)
    (call,) = called.tool_calls or ()
    arguments = call.function.arguments
    result = capital_of(**(json.loads(arguments) if isinstance(arguments, str) else arguments))
    told = {"type": "text", "text": f"<tool_response>\n{result}\n</tool_response>"}
    answer = chat.generate([*asked, called, ChatMessage(MessageRole.TOOL_RESPONSE, [told])])
    return str(answer.content)


def litellm(api: str, model: str, request: str, kind: str) -> str:
    from litellm import completion

    function = {"name": "capital_of", "description": "Tells the capital of a country.", "parameters": PARAMETERS}
    ask: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": api,
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    asked = [{"role": "user", "content": request}]
    said = completion(messages=asked, **ask).choices[0].message
    (call,) = said.tool_calls
    result = capital_of(**json.loads(call.function.arguments))
    results = [{"role": "tool", "tool_call_id": call.id, "content": result}]
    return str(completion(messages=[*asked, said.model_dump(), *results], **ask).choices[0].message.content)


def anthropic(api: str, model: str, request: str, kind: str) -> str:
    """By `/v1/messages` of litellm's proxy, which `api` is."""
    tools = [{"name": "capital_of", "description": "Tells the capital of a country.", "input_schema": PARAMETERS}]
    ask = {"model": model, "max_tokens": TOKENS, "temperature": 0, "tools": tools}
    asked = [{"role": "user", "content": request}]
    said = _post(f"{api}/messages", {**ask, "messages": asked})
    (call,) = [block for block in said["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": capital_of(**call["input"])}
    messages = [*asked, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
    answer = _post(f"{api}/messages", {**ask, "messages": messages})
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def open_webui(api: str, model: str, request: str, kind: str) -> str:
    """By its `/api`, where nobody need sign up."""
    key = _post(f"{api}/v1/auths/signin", {"email": "", "password": ""})["token"]
    function = {"name": "capital_of", "description": "Tells the capital of a country.", "parameters": PARAMETERS}
    ask = {"model": model, "tools": [{"type": "function", "function": function}], "max_tokens": TOKENS}
    asked = [{"role": "user", "content": request}]
    said = _post(f"{api}/chat/completions", {**ask, "messages": asked}, key)["choices"][0]["message"]
    (call,) = said["tool_calls"]
    content = capital_of(**json.loads(call["function"]["arguments"]))
    result = {"role": "tool", "tool_call_id": call["id"], "content": content}
    answer = _post(f"{api}/chat/completions", {**ask, "messages": [*asked, said, result]}, key)
    return str(answer["choices"][0]["message"]["content"])


def _post(url: str, body: dict[str, Any], key: str = "") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


PARAMETERS = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}
PROGRAMS: dict[str, Callable[[str, str, str, str], str]] = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "smolagents": smolagents,
    "litellm": litellm,
    "open-webui": open_webui,
    "anthropic": anthropic,
}


def main() -> None:
    program, api, model, request = sys.argv[1:]
    name, _, kind = program.partition(" ")
    answer = PROGRAMS[name](api, model, request, kind)
    assert calls == ["France"], calls
    print(answer)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main()
