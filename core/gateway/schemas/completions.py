"""`/v1/completions`: the request, and the answer, which is also the shape of a streamed one's chunks."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from core.errors import RequestError
from core.gateway.schemas.common import Body, TokenId, Usage
from core.gateway.schemas.decoding import Idle
from core.interfaces.engine import Conversation

DEFAULT_MAX_TOKENS = 16


class CompletionBody(Body, kw_only=True):
    idle: ClassVar[Idle] = {**Body.idle, "best_of": (1,), "echo": (False,), "logprobs": (False,), "suffix": ("",)}

    prompt: str | list[str | TokenId | list[TokenId]]

    def _prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        match self.prompt:
            case str() as text:
                return [text]
            case [str() as text]:
                return [text]
            case [[*ids]] | [*ids] if ids and all(isinstance(item, int) for item in ids):
                return [tuple(item for item in ids if isinstance(item, int))]
        raise RequestError(
            "'prompt' must be one prompt: a string, or a list of token ids that is not empty",
            hint="send several prompts as several requests",
            param="prompt",
        )

    def _limit(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
