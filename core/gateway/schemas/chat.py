"""`/v1/chat/completions`: the request, the answer, and the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from core.errors import RequestError
from core.gateway.schemas.common import INT32, MAX_TOP_LOGPROBS, Body, Usage
from core.gateway.schemas.decoding import Idle
from core.gateway.schemas.messages import Messages, conversation
from core.interfaces.engine import Conversation

Count = Annotated[int, Meta(ge=1, le=INT32)]


class ChatBody(Body, kw_only=True):
    """`max_completion_tokens` is the newer name of `max_tokens`.

    `metadata`, `safety_identifier` and `prompt_cache_key` are accepted, and change nothing.
    """

    idle: ClassVar[Idle] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    idle_inside: ClassVar[Mapping[str, Idle]] = {
        **Body.idle_inside,
        "messages": {
            "tool_calls": ([],),
            "tool_call_id": (),
            "function_call": (),
            "refusal": (),
            "audio": (),
            "annotations": ([],),
        },
    }

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def _prompts(self) -> list[Conversation]:
        return [conversation(self.messages)]

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


class AnswerMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


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


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(Struct, kw_only=True):
    """`usage` is there where `stream_options.include_usage` asks for it: null in all but the last chunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
