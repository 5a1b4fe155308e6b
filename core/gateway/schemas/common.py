"""What the generating endpoints share: sampling, streaming and the number of choices in; usage out.

Field names and meanings follow the OpenAI API reference (platform.openai.com/docs/api-reference). Of vLLM's
extensions there are top_k, min_p, repetition_penalty, stop_token_ids and ignore_eos; max_time is that of transformers'
GenerationConfig. What other servers call otherwise is in `foreign.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from msgspec import Meta, Struct, field

from core.errors import RequestError
from core.gateway.schemas.decoding import Fields, Idle
from core.gateway.schemas.foreign import IDLE, INSTEAD, ours
from core.interfaces.engine import Conversation, GenerationRequest

MAX_CHOICES = 16
MAX_GENERATIONS = 128
"""Choices x prompts of one request."""

MAX_STOPS = 16
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_CHARACTERS = 4 * 1024 * 1024

IN_MEMORY = ("in_memory", "in-memory")
"""How long prompts are kept, in both of the API's spellings: their caches lie in the nodes' memory."""

INT32 = 2**31 - 1
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - MAX_CHOICES)]
"""Choices add their number to it, and stay within 64 bits."""
Seconds = Annotated[
    float,
    Meta(gt=0, description="For how many seconds the request may take; the host's own bound holds, too."),
]

Prompt: TypeAlias = str | tuple[int, ...] | Conversation


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Body(Fields, kw_only=True):
    """A request for generations. `user` is accepted, and changes nothing."""

    idle: ClassVar[Idle] = IDLE
    idle_inside: ClassVar[Mapping[str, Idle]] = {
        "stream_options": {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    }
    instead: ClassVar[Mapping[str, str]] = INSTEAD

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32, description="-1 and 0 take all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] = field(default_factory=dict)
    stop: StopText | Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    max_time: Seconds | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return ours(fields)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def names(self) -> dict[str, str]:
        """The endpoint's own names of an engine's fields, where they differ: see `naming_fields`."""
        return {"deadline": "max_time"}

    def generations(self, client: str = "", deadline: float = math.inf) -> tuple[GenerationRequest, ...]:
        """What the engine is asked for, in the order of the choices. Raises RequestError for fields that conflict."""
        if self.stream_options and not self.stream:
            raise RequestError("'stream_options' goes only with 'stream': true", param="stream_options")
        prompts = self._prompts()
        if len(prompts) * self.n > MAX_GENERATIONS:
            raise RequestError(
                f"{len(prompts)} prompts with {self.n} choices each are too many",
                hint=f"ask for at most {MAX_GENERATIONS} generations in one request",
                param="n" if len(prompts) <= MAX_GENERATIONS else "prompt",
            )
        return tuple(
            self._generation(prompt, choice, client, deadline) for prompt in prompts for choice in range(self.n)
        )

    def _generation(self, prompt: Prompt, choice: int, client: str, deadline: float) -> GenerationRequest:
        return GenerationRequest(
            prompt=prompt,
            max_tokens=self._limit(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + choice,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self._top_logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            client=client,
            deadline=deadline,
        )

    def _prompts(self) -> Sequence[Prompt]:
        raise NotImplementedError

    def _limit(self) -> int | None:
        raise NotImplementedError

    def _top_logprobs(self) -> int | None:
        raise NotImplementedError

    def _prompt_logprobs(self) -> int | None:
        return None


def require_short(texts: Sequence[str], param: str) -> None:
    """Raises RequestError where the texts of a prompt are longer than any prompt that is taken."""
    characters = sum(map(len, texts))
    if characters > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            f"'{param}' is too long",
            f"it has {characters} characters",
            f"send at most {MAX_PROMPT_CHARACTERS}",
            param=param,
            code="string_above_max_length",
        )


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """Tokens that an answer cost. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
