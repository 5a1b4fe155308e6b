"""The answer of Anthropic's `/v1/messages`, the events of a streamed one, and its errors."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field


class Text(Struct, tag_field="type", tag="text"):
    text: str = ""


class Thinking(Struct, tag_field="type", tag="thinking"):
    """What the model thought before it answered."""

    thinking: str = ""
    signature: str = ""


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


Block: TypeAlias = Text | Thinking | ToolUse
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(Struct):
    """Tokens: `cache_read_input_tokens` of the prompt were found in caches, and are not among the `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageObject(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    """How many tokens the prompt has."""

    input_tokens: int


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A fragment of the JSON text of a tool's input."""

    partial_json: str


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | InputJsonDelta


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageObject


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockMore(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageMore(Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class AnthropicError(Struct):
    type: str
    message: str


class AnthropicErrorBody(Struct, tag_field="type", tag="error"):
    error: AnthropicError
    request_id: str | UnsetType | None = UNSET


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockMore | BlockStop | MessageMore | MessageStop | AnthropicErrorBody
)
