"""`/v1/completions`: the request, and the answer, which is also the shape of a streamed one's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeGuard, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from core.errors import RequestError
from core.gateway.schemas.common import INT32, MAX_TOP_LOGPROBS, Body, TokenId, Usage, require_short
from core.gateway.schemas.decoding import Idle
from core.gateway.schemas.foreign import UNBOUNDED

MAX_SCORES = 2 * 1024 * 1024
"""How many log probabilities of prompts, alternatives included, are held for one answer."""

T = TypeVar("T")


class CompletionBody(Body, kw_only=True):
    """`prompt` is one prompt or several, each a text or a list of token ids. `max_tokens` 0 evaluates it alone, -1
    takes all the room that there is.

    `echo` puts the prompt before each choice's text, and with `logprobs` its tokens before the choice's own.
    """

    idle: ClassVar[Idle] = {**Body.idle, "suffix": ("",)}

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=UNBOUNDED, le=INT32)] = 16
    best_of: Annotated[int, Meta(ge=1, description="Only as many as `n`.")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def names(self) -> dict[str, str]:
        return {"prompt_logprobs": "logprobs", "deadline": "max_time"}

    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        """Raises RequestError for what is no prompt, and for more text or log probabilities than are taken."""
        prompts = self._listed()
        require_short([prompt for prompt in prompts if isinstance(prompt, str)], "prompt")
        if self.echo and self.logprobs is not None:
            self._require_few_scores(sum(map(len, prompts)))
        return prompts

    def _listed(self) -> Sequence[str | tuple[int, ...]]:
        match self.prompt:
            case str() as text:
                return [text]
            case [*ids] if _all(ids, int):
                return [tuple(ids)]
            case [*lists] if _all(lists, list) and all(_all(ids, int) for ids in lists):
                return [tuple(ids) for ids in lists]
            case [*texts] if _all(texts, str):
                return texts
        raise RequestError(
            "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists",
            hint="leave no list empty",
            param="prompt",
        )

    def _require_few_scores(self, length: int) -> None:
        """`length` of all prompts, in tokens, or in characters where these are not known: mostly more."""
        scores = length * self.n * (1 + (self.logprobs or 0))
        if scores > MAX_SCORES:
            raise RequestError(
                f"'echo' with 'logprobs' asks for about {scores} log probabilities of the prompt",
                f"one answer tells at most {MAX_SCORES}",
                "send fewer prompts at a time, or ask for fewer alternatives",
                param="logprobs",
            )

    _prompts = prompts

    def _limit(self) -> int | None:
        if self.best_of not in (None, self.n):
            raise RequestError(
                "'best_of' is supported only where it equals 'n'",
                hint="ask for more choices with 'n'",
                param="best_of",
                code="unsupported_parameter",
            )
        return None if self.max_tokens == UNBOUNDED else self.max_tokens

    def _top_logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


def _all(items: Sequence[object], kind: type[T]) -> TypeGuard[Sequence[T]]:
    return bool(items) and all(isinstance(item, kind) for item in items)


class CompletionLogprobs(Struct):
    """One entry a token. A prompt's first token has no log probability: nothing predicts it.

    A token that is only part of a character is named by its bytes, as in `bytes:\\xe2\\x82`. `text_offset` counts
    characters of the choice's text. `top_logprobs` is null where no alternatives were asked for.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(Struct, kw_only=True):
    """In chunks, `usage` is there where `stream_options.include_usage` asks for it: null in all but the last."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
