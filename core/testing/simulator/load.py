"""Who asks for what, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import trio

from core.coordinator.generator import Generator
from core.errors import CoreError
from core.interfaces.engine import GenerationRequest
from core.testing.simulator.description import Load
from core.testing.simulator.model import VOCABULARY


@dataclass(slots=True)
class Stream:
    """One generation: when it was asked for and when each token came, in seconds of trio's clock."""

    client: str
    asked: float
    prompt_tokens: int
    max_tokens: int
    tokens: list[float] = field(default_factory=list)
    recoveries: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.max_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.asked

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / (self.tokens[-1] - self.tokens[0])

    @property
    def longest_gap(self) -> float:
        return max((later - earlier for earlier, later in pairwise(self.tokens)), default=0.0)


class Clients:
    """`run` them all; `streams` has what they asked for so far."""

    def __init__(self, load: Load, random: Random) -> None:
        self.streams: list[Stream] = []
        self._load = load
        self._random = random

    async def run(self, generator: Generator) -> None:
        """Until all have what they asked for, or an error."""
        async with trio.open_nursery() as nursery:
            for number in range(self._load.streams):
                requests = [self._request(f"stream-{number + 1}") for _ in range(self._load.turns)]
                nursery.start_soon(self._ask_in_turn, generator, requests)
            for number, seconds in enumerate(self._arrivals()):
                await trio.sleep(seconds)
                nursery.start_soon(self._ask, generator, self._request(f"visitor-{number + 1}"))

    def _arrivals(self) -> Iterator[float]:
        """Seconds from each to the next: a Poisson process."""
        left = self._load.seconds
        while self._load.per_minute and (gap := self._random.expovariate(self._load.per_minute / 60)) <= left:
            left -= gap
            yield gap

    def _request(self, client: str) -> GenerationRequest:
        prompt, answer = self._random.randint(*self._load.prompt), self._random.randint(*self._load.answer)
        tokens = tuple(self._random.choices(range(VOCABULARY), k=prompt))
        return GenerationRequest(tokens, max_tokens=answer, temperature=0, ignore_eos=True, client=client)

    async def _ask_in_turn(self, generator: Generator, requests: list[GenerationRequest]) -> None:
        for request in requests:
            await self._ask(generator, request)

    async def _ask(self, generator: Generator, request: GenerationRequest) -> None:
        assert isinstance(request.prompt, tuple) and request.max_tokens is not None
        stream = Stream(request.client, trio.current_time(), len(request.prompt), request.max_tokens)
        self.streams.append(stream)
        try:
            async with generator.generate(request) as session:
                async for delta in session:
                    stream.tokens += [trio.current_time()] * (delta.tokens - len(stream.tokens))
                    stream.recoveries = session.recoveries
        except CoreError as error:
            stream.error = str(error)
