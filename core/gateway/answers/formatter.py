"""What every endpoint's formatter of an answer has in common."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from core.gateway.answers.generations import Outcome, Step
from core.gateway.errors import Failure
from core.gateway.schemas.common import Body, CompletionTokensDetails, PromptTokensDetails, Usage
from core.interfaces.engine import Generation

DONE = b"data: [DONE]\n\n"


def event(data: Struct) -> bytes:
    """One server-sent event (html.spec.whatwg.org); JSON has no line breaks of its own."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: Struct) -> bytes:
    """The same, under the name of its type."""
    return b"event: " + str(data.__struct_config__.tag).encode() + b"\n" + event(data)


class Formatter(ABC):
    """How an endpoint words one answer: as a whole, or event by event."""

    media: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    out_of_time = False
    """Whether its deadline ended it."""

    @abstractmethod
    def whole(self, outcomes: Sequence[Outcome]) -> Struct: ...

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """The events that come before any step."""

    @abstractmethod
    def step(self, step: Step) -> Iterator[bytes]: ...

    @abstractmethod
    def closing(self) -> Iterator[bytes]: ...

    def failed(self, failure: Failure) -> Iterator[bytes]:
        """The last events of a stream that broke off."""
        yield event(failure.body())


class EventFormatter(Formatter):
    """A formatter of one generation whose answer, whole or streamed, is built event by event."""

    @property
    @abstractmethod
    def built(self) -> Struct:
        """What the events so far add up to."""

    def whole(self, outcomes: Sequence[Outcome]) -> Struct:
        (outcome,) = outcomes
        for delta in outcome.deltas:
            for _ in self._step(Step(0, outcome.generation, delta)):
                pass
        for _ in self._closing():
            pass
        return self.built

    def step(self, step: Step) -> Iterator[bytes]:
        return map(named_event, self._step(step))

    def closing(self) -> Iterator[bytes]:
        return map(named_event, self._closing())

    @abstractmethod
    def _step(self, step: Step) -> Iterator[Struct]: ...

    @abstractmethod
    def _closing(self) -> Iterator[Struct]: ...


class Tally:
    """Counts what an answer costs that has `n` choices for each prompt."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._generations: dict[int, Generation] = {}
        self._tokens: dict[int, int] = {}
        self._reasoning_tokens: dict[int, int] = {}

    def count(self, index: int, generation: Generation, tokens: int, reasoning_tokens: int = 0) -> None:
        """`tokens` is how many the generation has made so far, `reasoning_tokens` how many of these are thoughts."""
        self._generations[index] = generation
        self._tokens[index] = tokens
        self._reasoning_tokens[index] = reasoning_tokens

    def usage(self) -> Usage:
        asked = [generation for index, generation in self._generations.items() if index % self._n == 0]
        prompt = sum(generation.prompt_tokens for generation in asked)
        completion = sum(self._tokens.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(generation.cached_tokens for generation in asked)),
            completion_tokens_details=CompletionTokensDetails(sum(self._reasoning_tokens.values())),
        )


class ChoicesFormatter(Formatter):
    """A formatter whose answer is a list of choices: `choices` of them, as `body` asked for."""

    prefix: ClassVar[str]

    def __init__(self, model: str, body: Body, choices: int) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self.choices = choices
        self.include_usage = body.include_usage
        self.tally = Tally(body.n)

    def total(self, outcomes: Sequence[Outcome]) -> Usage:
        for index, outcome in enumerate(outcomes):
            self.tally.count(index, outcome.generation, outcome.deltas[-1].tokens)
        return self.tally.usage()

    def no_usage(self) -> UnsetType | None:
        """What every chunk but the last says of usage."""
        return None if self.include_usage else UNSET
