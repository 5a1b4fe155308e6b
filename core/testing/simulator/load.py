"""Who asks for what, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import trio

from core.coordinator.generator import Generator
from core.errors import CoreError
from core.interfaces.engine import GenerationRequest
from core.testing.simulator.description import Load
from core.testing.simulator.model import TOKEN, VOCABULARY


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

    def __init__(self, loads: Sequence[Load], random: Random) -> None:
        self.streams: list[Stream] = []
        self._loads = loads
        self._random = random

    async def run(self, generator: Generator) -> None:
        """Until all have what they asked for, or an error."""
        async with trio.open_nursery() as nursery:
            for load in self._loads:
                nursery.start_soon(self._run, load, generator)

    async def _run(self, load: Load, generator: Generator) -> None:
        await trio.sleep(load.starts)
        async with trio.open_nursery() as nursery:
            for number in range(load.streams):
                requests = self._requests(load, f"{load.name}-{number + 1}", load.turns)
                nursery.start_soon(self._ask_in_turn, generator, requests)
            for number, seconds in enumerate(self._arrivals(load)):
                await trio.sleep(seconds)
                nursery.start_soon(self._ask_in_turn, generator, self._requests(load, f"{load.name}-{number + 1}", 1))

    def _arrivals(self, load: Load) -> Iterator[float]:
        """Seconds from each to the next: a Poisson process."""
        left = load.seconds
        while load.per_minute and (gap := self._random.expovariate(load.per_minute / 60)) <= left:
            left -= gap
            yield gap

    def _requests(self, load: Load, client: str, turns: int) -> list[GenerationRequest]:
        requests, said = [], list[int]()
        for _ in range(turns):
            bounds = load.follow_up if said and load.follow_up else load.prompt
            own, answer = self._random.randint(*bounds), self._random.randint(*load.answer)
            prompt = tuple(said + self._random.choices(range(VOCABULARY), k=own))
            requests.append(GenerationRequest(prompt, answer, temperature=0, ignore_eos=True, client=client))
            said = [*prompt, *[TOKEN] * answer] if load.follow_up else []
        return requests

    async def _ask_in_turn(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
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
