"""The items of a response's input, and the messages that they are to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from core.gateway.schemas.messages import RefusalPart, told, told_call
from core.interfaces.engine import Conversation

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class OutputTextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """What an earlier response said; its text alone is told."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] | None = None
    parsed: Any = None


class ReasoningText(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, forbid_unknown_fields=True, tag_field="type", tag="message"):
    """Of the user, or of the model as an earlier response had it. Its `type` may be left out.

    `phase` is a label of OpenAI's for what the model said; it changes nothing.
    """

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputTextPart | RefusalPart]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Struct, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Struct, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    """What the model thought before; the model's chat template decides whether it is told of it."""

    id: str | None = None
    summary: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)
    content: list[ReasoningText] | None = None
    status: Status | None = None


class ItemReference(Struct, forbid_unknown_fields=True, tag_field="type", tag="item_reference"):
    """An item of an earlier response, or of its input, that is kept here. Its `type` may be left out."""

    id: str


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
GivenItem: TypeAlias = InputItem | ItemReference


def conversation_of(instructions: str | None, items: Sequence[InputItem]) -> Conversation:
    """What the model's template is given: what the assistant thought, said and called in a row is one message.

    Raises RequestError for too much text.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": [instructions]})
    for item in items:
        _append(messages, item)
    for message in messages:
        message.update({name: "".join(message[name]) for name in _IN_PARTS if name in message})
    return told(messages, "input")


_IN_PARTS = ("content", "reasoning_content")


def _append(messages: list[dict[str, Any]], item: InputItem) -> None:
    """What a message is made of is gathered in lists: adding to a text again and again costs its square."""
    match item:
        case MessageItem("assistant"):
            _assistant(messages)["content"].append(_text(item.content))
        case MessageItem():
            messages.append({"role": item.role, "content": [_text(item.content)]})
        case ReasoningItem():
            _assistant(messages).setdefault("reasoning_content", []).append(_text(item.content or ""))
        case FunctionCallItem():
            call = told_call(item.call_id, item.name, item.arguments)
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case FunctionCallOutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(item.output)]})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
