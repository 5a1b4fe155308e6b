"""The generations of one answer, run side by side in trio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from core.gateway.bridge import closing
from core.interfaces.engine import Delta, Engine, FinishReason, Generation, GenerationRequest, TokenLogprob

AT_ONCE = 16
"""How many generations of one answer run side by side; those beyond begin as others end."""


@dataclass(frozen=True, slots=True)
class Step:
    """What choice `index` of an answer gained, and the generation that it came from."""

    index: int
    generation: Generation
    delta: Delta


@dataclass(slots=True)
class Outcome:
    """A generation at its end. `answered` is when it was made, with the first delta, by time.perf_counter_ns."""

    generation: Generation
    deltas: list[Delta] = field(default_factory=list)
    answered: int = field(default_factory=lambda: time.perf_counter_ns())

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(token for delta in self.deltas for token in delta.logprobs)

    @property
    def finish_reason(self) -> FinishReason:
        return self.deltas[-1].finish_reason or "length"


@dataclass(frozen=True, slots=True)
class Running:
    """Generations that run side by side, as far as they have begun; iterating it gives their steps."""

    generations: list[Generation]
    steps: AsyncIterator[Step]

    def __aiter__(self) -> AsyncIterator[Step]:
        return self.steps

    @property
    def waits_for(self) -> str:
        """Why the first of them that does not go on does not; empty if all do. Any thread may ask."""
        return next(filter(None, (each.waits_for for each in self.generations)), "")


async def _steps(index: int, generation: Generation) -> AsyncIterator[Step]:
    async with closing(aiter(generation)) as deltas:
        async for delta in deltas:
            yield Step(index, generation, delta)


@asynccontextmanager
async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> AsyncIterator[Running]:
    """The steps of all generations, as they come.

    Entering ends when all are admitted, or when one has something to say while others wait for their turn; it raises
    what refuses any of them. The first failure ends them all.
    """
    if len(requests) == 1:
        async with engine.generate(requests[0]) as generation:
            yield Running([generation], _steps(0, generation))
        return
    generations: list[Generation] = []
    sender, receiver = trio.open_memory_channel[Step](0)
    begun = trio.Event()
    waiting = set(range(len(requests)))
    turns = trio.Semaphore(AT_ONCE)

    async def run(index: int, request: GenerationRequest, steps: trio.MemorySendChannel[Step]) -> None:
        async with steps, turns, engine.generate(request) as generation:
            generations.append(generation)
            waiting.discard(index)
            if not waiting:
                begun.set()
            async with closing(_steps(index, generation)) as own:
                async for step in own:
                    begun.set()
                    await steps.send(step)

    async with trio.open_nursery() as nursery, receiver:
        for index, request in enumerate(requests):
            nursery.start_soon(run, index, request, sender.clone())
        sender.close()
        await begun.wait()
        yield Running(generations, receiver)
