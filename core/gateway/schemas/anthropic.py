"""The request of Anthropic's `/v1/messages`.

Field names and meanings follow its API reference (platform.claude.com/docs/en/api/messages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from core.errors import RequestError
from core.gateway.dialects.dialect import Wishes
from core.gateway.dialects.grammars import Function
from core.gateway.schemas.common import INT32, MAX_STOPS, Seconds, StopText
from core.gateway.schemas.decoding import Fields, Idle
from core.gateway.schemas.messages import MAX_MESSAGES, told, told_call
from core.gateway.schemas.tools import (
    MAX_FUNCTIONS,
    FunctionName,
    Schema,
    among,
    offered,
    require_call_possible,
    require_distinct,
)
from core.interfaces.engine import Conversation, GenerationRequest

CacheControl: TypeAlias = dict[str, Any]
"""Prompts that begin alike start from caches by themselves: it changes nothing."""


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """What the model thought before; its chat template decides whether it is told of it. Nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """What a tool returned. The model reads of one with `is_error` that it failed."""

    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


class UserMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class Tool(Struct, forbid_unknown_fields=True):
    """With `strict` the arguments of a call fit `input_schema`. Hints for clients and for Anthropic's servers change
    nothing."""

    name: FunctionName
    input_schema: Schema
    description: str | None = None
    strict: bool = False
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    def function(self) -> Function:
        return Function(self.name, self.description, self.input_schema, self.strict)


class ToolChoice(Struct, forbid_unknown_fields=True):
    """`name` goes with the type `tool`: the one that must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Struct, forbid_unknown_fields=True):
    """Whether a model thinks that can do either. `budget_tokens` and `display` change nothing: thoughts are told whole,
    and `max_tokens` bounds them with the answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    schema_: Schema = field(name="schema")
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`effort` is told to chat templates that know one."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Fields, kw_only=True):
    """What a prompt is made of.

    Of `tools` those are offered to the model that the client runs itself; others, which Anthropic's servers run, are
    left out. If the last message is the assistant's, the answer goes on with it. `context_management` changes nothing:
    the history is told as it was sent.
    """

    idle: ClassVar[Idle] = {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: str
    messages: Annotated[
        list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1, max_length=MAX_MESSAGES)
    ]
    system: str | list[TextBlock] = ""
    tools: Annotated[list[Tool], Meta(max_length=MAX_FUNCTIONS)] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = field(default_factory=OutputConfig)
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return offered(fields, "custom")

    @property
    def names(self) -> dict[str, str]:
        """The endpoint's own names of an engine's fields, where they differ: see `naming_fields`."""
        return {"prompt": "messages", "template_options": "thinking"}

    def conversation(self) -> Conversation:
        """What the model's template is given. Raises RequestError for too much text."""
        messages: list[dict[str, Any]] = []
        if system := text_of(self.system):
            messages.append({"role": "system", "content": system})
        for message in self.messages:
            _append(messages, message)
        continued = isinstance(self.messages[-1], AssistantMessage)
        return replace(told(messages, "messages"), opens_answer=not continued, continues_last=continued)

    def wishes(self) -> Wishes:
        functions, required = self._functions()
        choice, wanted = self.tool_choice, self.output_config.format
        return Wishes(
            functions=functions,
            required=required,
            one=choice is not None and (choice.disable_parallel_tool_use or choice.type == "tool"),
            schema=wanted.schema_ if wanted else None,
            hints=self._hints(),
            schema_field="output_config.format",
        )

    def _functions(self) -> tuple[tuple[Function, ...], bool]:
        functions = tuple(tool.function() for tool in self.tools)
        require_distinct(functions)
        match self.tool_choice:
            case ToolChoice("none"):
                return (), False
            case ToolChoice("tool", str(name)):
                return among(functions, [name], "tool_choice.name"), True
            case ToolChoice("tool"):
                raise RequestError("'tool_choice.name' is missing", param="tool_choice.name")
            case ToolChoice("any"):
                require_call_possible(functions, "required")
                return functions, True
        return functions, False

    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        if self.thinking is not None:
            hints["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config.effort is not None:
            hints["reasoning_effort"] = self.output_config.effort
        return hints


class MessagesBody(CountBody, kw_only=True):
    """`metadata` is accepted, and changes nothing. `max_tokens` may be more than there is room for."""

    instead: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "use 'max_tokens'",
        "response_format": "use 'output_config' with 'format'",
        "stop": "use 'stop_sequences'",
    }
    idle: ClassVar[Idle] = {**CountBody.idle, "service_tier": ("auto", "standard_only")}

    max_tokens: Annotated[int, Meta(ge=0, le=INT32)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    stop_sequences: Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()
    stream: bool = False
    metadata: dict[str, Any] | None = None
    max_time: Seconds | None = None

    @property
    def names(self) -> dict[str, str]:
        return {**super().names, "stop": "stop_sequences", "deadline": "max_time"}

    def generation(self, client: str, deadline: float) -> GenerationRequest:
        return GenerationRequest(
            prompt=self.conversation(),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            fits_context=True,
            client=client,
            deadline=deadline,
        )


def text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _append(messages: list[dict[str, Any]], message: UserMessage | AssistantMessage | SystemMessage) -> None:
    match message:
        case AssistantMessage(content):
            messages.append(_said(content))
        case UserMessage(str(text)) | SystemMessage(str(text)):
            messages.append({"role": message.__struct_config__.tag, "content": text})
        case UserMessage(blocks):
            results = [block for block in blocks if isinstance(block, ToolResultBlock)]
            texts = [block for block in blocks if isinstance(block, TextBlock)]
            messages += [{"role": "tool", "tool_call_id": one.tool_use_id, "content": one.text} for one in results]
            if texts or not results:
                messages.append({"role": "user", "content": text_of(texts)})
        case SystemMessage(blocks):
            messages.append({"role": "system", "content": text_of(blocks)})


def _said(content: str | Sequence[TextBlock | ThinkingBlock | ToolUseBlock]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts = [block for block in content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    calls = [
        told_call(block.id, block.name, msgspec.json.encode(block.input).decode())
        for block in content
        if isinstance(block, ToolUseBlock)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return said
