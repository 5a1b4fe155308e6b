"""What every endpoint's wording of an answer has in common."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from core.gateway.answers.generations import Outcome, Step
from core.gateway.schemas.common import Usage
from core.interfaces.engine import Generation

DONE = b"data: [DONE]\n\n"


def event(data: Struct | dict[str, object]) -> bytes:
    """One server-sent event (html.spec.whatwg.org); JSON has no line breaks of its own."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Wording(ABC):
    """How an endpoint words one answer: as a whole, or event by event."""

    @abstractmethod
    def whole(self, outcomes: Sequence[Outcome]) -> Struct: ...

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """The events that come before any step."""

    @abstractmethod
    def step(self, step: Step) -> Iterator[bytes]: ...

    @abstractmethod
    def closing(self) -> Iterator[bytes]: ...


@dataclass(slots=True)
class Tally:
    """Counts what an answer with `n` choices to a prompt costs."""

    n: int
    _choices: dict[int, tuple[Generation, int]] = field(default_factory=dict)

    def count(self, index: int, generation: Generation, tokens: int) -> None:
        """`tokens` is how many the generation has made so far."""
        self._choices[index] = (generation, tokens)

    def usage(self) -> Usage:
        prompt = sum(made.prompt_tokens for index, (made, _) in self._choices.items() if index % self.n == 0)
        completion = sum(tokens for _, tokens in self._choices.values())
        return Usage(prompt, completion, prompt + completion)


@dataclass(slots=True)
class OpenAIWording(Wording):
    """The wordings that have choices. `include_usage` is a stream's alone: a whole answer always says it."""

    model: str
    choices: int
    n: int
    include_usage: bool
    id: str = field(init=False)
    created: int = field(init=False)
    tally: Tally = field(init=False)

    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.tally = Tally(self.n)

    def total(self, outcomes: Sequence[Outcome]) -> Usage:
        for index, outcome in enumerate(outcomes):
            self.tally.count(index, outcome.generation, outcome.deltas[-1].tokens)
        return self.tally.usage()

    def no_usage(self) -> UnsetType | None:
        """What every chunk but the last says of usage."""
        return None if self.include_usage else UNSET
