"""Tools for chat templates that have no place for them: told as text, in the form of Hermes.

The words are those of Qwen 2.5's template, which models that were trained on this form know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.gateway.dialects.forms import HERMES
from core.interfaces.engine import Conversation

_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""


def as_text(conversation: Conversation) -> Conversation:
    """The same in messages of system, user and assistant alone.

    Functions on offer are told by the system, calls and results by who made them: results are the user's.
    """
    messages = [_together(turn) for turn in _turns(conversation.messages)]
    if conversation.tools:
        _offer(messages, conversation.tools)
    return replace(conversation, messages=tuple(messages), tools=())


def _turns(messages: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as they are told, what the user says of results or after them with these."""
    turn: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        told = _told(message)
        if turn and not (after_result and told["role"] == "user"):
            yield turn
            turn = []
        turn.append(told)
        after_result = message["role"] == "tool"
    if turn:
        yield turn


def _together(turn: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, *more = turn
    return {**first, "content": "\n".join(each["content"] for each in turn)} if more else first


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([*([content] if content else []), *calls])} if calls else kept


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function["arguments"]}
    return f"{HERMES.open}\n{json.dumps(called, ensure_ascii=False)}\n{HERMES.close}"


def _offer(messages: list[dict[str, Any]], tools: tuple[Mapping[str, Any], ...]) -> None:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    offer = _OFFER.format(tools=signatures, open=HERMES.open, close=HERMES.close)
    if messages and messages[0]["role"] in ("system", "developer"):
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{offer}"}
    else:
        messages.insert(0, {"role": "system", "content": offer})
