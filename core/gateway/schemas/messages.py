"""The messages of a conversation, one kind for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from core.errors import RequestError
from core.gateway.schemas.common import require_short
from core.interfaces.engine import Conversation

MAX_MESSAGES = 4096
MAX_CALLS = 1024
"""Of one message."""


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """`cache_control`, an option of other servers, changes nothing."""

    text: str
    cache_control: dict[str, Any] | None = None


class RefusalPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """What the model said to refuse, which is text as well."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content: TypeAlias = str | list[TextPart]
Said: TypeAlias = str | list[TextPart | RefusalPart]


class _Message(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    """`id`, and `cache_control`, an option of other servers, change nothing."""

    name: str | None = None
    id: str | None = None
    cache_control: dict[str, Any] | None = None


class SystemMessage(_Message, tag="system"):
    content: Content


class DeveloperMessage(_Message, tag="developer"):
    """A system message, to templates that know no developer."""

    content: Content


class UserMessage(_Message, tag="user"):
    content: Content


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is a JSON object's text; what a client has `parsed_arguments` as changes nothing."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Clients that gather a stream's deltas send their `index` along; it changes nothing."""

    id: str
    function: CalledFunction
    index: int | None = None


class AssistantMessage(_Message, tag="assistant"):
    """What the model said before; a `refusal` is told like `content`, either of which may be null or absent.

    Whether the model is told what it thought, `reasoning_content` (`reasoning` to other servers), is up to its chat
    template. An answer may be handed back whole: what a client has `parsed` it as, its `annotations`, and what other
    servers and libraries add to it, change nothing.
    """

    content: Said | None = None
    tool_calls: Annotated[Sequence[ToolCall], Meta(max_length=MAX_CALLS)] = ()
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None
    annotations: list[Any] | None = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    provider_specific_fields: Any = None

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content or self.reasoning


class ToolMessage(_Message, tag="tool"):
    """What a function returned: the result of the call `tool_call_id`."""

    content: Content
    tool_call_id: str


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def conversation(
    messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
) -> Conversation:
    """What the model's template is given. Raises RequestError for too much text, and for options that conflict."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' are both true",
            "an answer either goes on with the last message or begins a new one",
            "set 'add_generation_prompt' to false",
            param="continue_final_message",
        )
    return replace(
        told([_render(message) for message in messages], "messages"),
        opens_answer=add_generation_prompt,
        continues_last=continue_final_message,
    )


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
        case AssistantMessage(tool_calls=calls, thoughts=thoughts, refusal=refusal):
            rendered["content"] = "\n".join(filter(None, (rendered["content"], refusal)))
            if calls:
                rendered["tool_calls"] = [
                    told_call(call.id, call.function.name, call.function.arguments) for call in calls
                ]
            if thoughts:
                rendered["reasoning_content"] = thoughts
    return rendered


def text_of(content: Content | Said | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
