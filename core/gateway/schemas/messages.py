"""The messages of a conversation, one kind for each role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

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


class AssistantMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model said before; a `content` that is null or absent is empty."""

    content: Content | None = None
    name: str | None = None


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def conversation(messages: Sequence[Message]) -> Conversation:
    """What the model's template is given. Raises RequestError for too much text."""
    rendered = tuple(_render(message) for message in messages)
    require_short([message["content"] for message in rendered], "messages")
    return Conversation(rendered)


def _render(message: Message) -> dict[str, Any]:
    rendered = {"role": message.__struct_config__.tag, "content": _text(message.content)}
    return rendered | ({} if message.name is None else {"name": message.name})


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
