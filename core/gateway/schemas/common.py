"""What the generating endpoints share: sampling, streaming and the number of choices in; usage out.

Field names and meanings follow the OpenAI API reference (platform.openai.com/docs/api-reference); `top_k` is an
extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from core.errors import RequestError
from core.gateway.schemas.decoding import Fields, Idle
from core.interfaces.engine import Conversation, GenerationRequest

MAX_STOPS = 16
MAX_CHOICES = 16
"""How many generations one request may start."""

INT32 = 2**31 - 1
StopText = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
Count = Annotated[int, Meta(ge=1, le=INT32)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Body(Fields, kw_only=True):
    """A request for generations."""

    idle: ClassVar[Idle] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "user": (),
    }
    idle_inside: ClassVar[Mapping[str, Idle]] = {"stream_options": {"include_obfuscation": (False,)}}

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def generations(self) -> tuple[GenerationRequest, ...]:
        """What the engine is asked for, in the order of the choices. Raises RequestError for fields that conflict."""
        if self.stream_options and not self.stream:
            raise RequestError("'stream_options' goes only with 'stream': true", param="stream_options")
        return tuple(self._generation(prompt, i) for prompt in self._prompts() for i in range(self.n))

    def _generation(self, prompt: str | tuple[int, ...] | Conversation, number: int) -> GenerationRequest:
        return GenerationRequest(
            prompt=prompt,
            max_tokens=self._limit(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else self.seed + number,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
        )

    def _prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        raise NotImplementedError

    def _limit(self) -> int | None:
        raise NotImplementedError


class Usage(Struct):
    """Tokens that an answer cost. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
