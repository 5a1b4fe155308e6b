"""The messages of a conversation, one kind for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from core.gateway.schemas.common import require_short
from core.interfaces.engine import Conversation

MAX_MESSAGES = 4096


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


Content: TypeAlias = str | list[TextPart]


class SystemMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """A system message, to templates that know no developer."""

    content: Content
    name: str | None = None


class UserMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is a JSON object's text."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Clients that gather a stream's deltas send their `index` along; it changes nothing."""

    id: str
    function: CalledFunction
    index: int | None = None


class AssistantMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model said before; a `content` that is null or absent is empty.

    Whether the model is told what it thought, `reasoning_content`, is up to its chat template.
    """

    content: Content | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    reasoning_content: str | None = None


class ToolMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a function returned: the result of the call `tool_call_id`."""

    content: Content
    tool_call_id: str
    name: str | None = None


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def conversation(messages: Sequence[Message]) -> Conversation:
    """What the model's template is given. Raises RequestError for too much text."""
    return told([_render(message) for message in messages], "messages")


def told(messages: Sequence[Mapping[str, Any]], param: str) -> Conversation:
    """The conversation of messages as templates expect them: each result has the name of its function.

    Raises RequestError for too much text.
    """
    require_short([text for message in messages for text in _texts(message)], param)
    functions = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    names = [functions.get(message.get("tool_call_id")) for message in messages]
    return Conversation(
        tuple(
            dict(message) if name is None else {"name": name, **message}
            for message, name in zip(messages, names, strict=True)
        )
    )


def told_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates expect it: they write arguments as JSON themselves, so they get the object.

    Text that is no object stays text: the model is told what it wrote.
    """
    try:
        value: Any = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        value = None
    function = {"name": name, "arguments": value if isinstance(value, dict) else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _texts(message: Mapping[str, Any]) -> list[str]:
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [message["content"], message.get("reasoning_content", ""), *calls]


def _render(message: Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.__struct_config__.tag, "content": text_of(message.content)}
    if message.name is not None:
        rendered["name"] = message.name
    match message:
        case ToolMessage(tool_call_id=call_id):
            rendered["tool_call_id"] = call_id
        case AssistantMessage(tool_calls=calls, reasoning_content=thoughts):
            if calls:
                rendered["tool_calls"] = [
                    told_call(call.id, call.function.name, call.function.arguments) for call in calls
                ]
            if thoughts:
                rendered["reasoning_content"] = thoughts
    return rendered


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
