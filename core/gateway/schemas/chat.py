"""`/v1/chat/completions`: the request, the answer, and the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from core.errors import RequestError
from core.gateway.schemas.common import Body, Count, Usage
from core.gateway.schemas.decoding import Idle
from core.interfaces.engine import Conversation


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True):
    idle: ClassVar[Idle] = {
        **Body.idle,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }
    idle_inside: ClassVar[Mapping[str, Idle]] = {
        **Body.idle_inside,
        "messages": {
            "name": (),
            "tool_calls": ([],),
            "tool_call_id": (),
            "function_call": (),
            "refusal": (),
            "audio": (),
            "annotations": ([],),
        },
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None

    def _prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        return [Conversation(tuple({"role": each.role, "content": each.text()} for each in self.messages))]

    def _limit(self) -> int | None:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("'max_tokens' and 'max_completion_tokens' differ", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens


class AssistantMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: None
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
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
