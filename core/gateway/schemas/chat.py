"""`/v1/chat/completions`: the request, the answer, and the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from core.errors import RequestError
from core.gateway.dialects.dialect import Wishes
from core.gateway.schemas.common import IN_MEMORY, INT32, MAX_TOP_LOGPROBS, Body, Usage
from core.gateway.schemas.decoding import Idle
from core.gateway.schemas.foreign import with_format, without_unbounded
from core.gateway.schemas.messages import Messages, conversation
from core.gateway.schemas.tools import (
    MAX_FUNCTIONS,
    AnswerCall,
    CallDelta,
    ChosenFunction,
    Effort,
    FunctionTool,
    ResponseFormat,
    ToolChoice,
    chosen,
    require_distinct,
    schema_of,
)
from core.interfaces.engine import Conversation

Count = Annotated[int, Meta(ge=1, le=INT32)]


class ChatBody(Body, kw_only=True):
    """`max_completion_tokens` is the newer name of `max_tokens`.

    `metadata`, `safety_identifier` and `prompt_cache_key` are accepted, and change nothing. With
    `continue_final_message`, which goes with `add_generation_prompt` false, the answer goes on with the last message.
    """

    idle: ClassVar[Idle] = {
        **Body.idle,
        "add_special_tokens": (False,),
        "audio": (),
        "function_call": ("none", "auto"),
        "echo": (False,),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": IN_MEMORY,
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    idle_inside: ClassVar[Mapping[str, Idle]] = {
        **Body.idle_inside,
        "messages": {
            "function_call": (),
            "audio": (),
        },
    }

    messages: Messages
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_FUNCTIONS)] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_unbounded(with_format(super().spelled_out(fields)), "max_tokens", "max_completion_tokens")

    @property
    def names(self) -> dict[str, str]:
        return {
            "prompt": "messages",
            "template_options": "chat_template_kwargs",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
            "deadline": "max_time",
        }

    def wishes(self) -> Wishes:
        """What is asked of the text. Raises RequestError for fields that conflict."""
        functions = [tool.function.function() for tool in self.tools]
        require_distinct(functions)
        callable_functions, required = chosen(functions, self.tool_choice)
        return Wishes(
            functions=callable_functions,
            required=required,
            one=not self.parallel_tool_calls or isinstance(self.tool_choice, ChosenFunction),
            schema=schema_of(self.response_format),
            effort=self.reasoning_effort,
            options=self.chat_template_kwargs,
        )

    def _prompts(self) -> list[Conversation]:
        return [conversation(self.messages, self.add_generation_prompt, self.continue_final_message)]

    def _limit(self) -> int | None:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("'max_tokens' and 'max_completion_tokens' differ", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens

    def _top_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' goes only with 'logprobs': true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None


class TopLogprob(Struct):
    """A token, its UTF-8 bytes (which may be only part of a character), and its log probability."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class AnswerMessage(Struct):
    """`content` is null where there are calls and nothing else was said; `reasoning_content` is what was thought."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    """What a chunk adds to a choice's message: the fields that it says something of."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Struct, kw_only=True):
    """`usage` is there where `stream_options.include_usage` asks for it: null in all but the last chunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
