"""The generations of one answer, run side by side in trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from core.interfaces.engine import Delta, Engine, FinishReason, Generation, GenerationRequest


@dataclass(frozen=True, slots=True)
class Step:
    """What choice `index` of an answer gained, and the generation that it came from."""

    index: int
    generation: Generation
    delta: Delta


@dataclass(slots=True)
class Outcome:
    """A generation at its end."""

    generation: Generation
    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> FinishReason:
        return self.deltas[-1].finish_reason or "length"


@asynccontextmanager
async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> AsyncIterator[AsyncIterator[Step]]:
    """The steps of all generations, as they come.

    Entering ends when all are admitted, or one has something to say while others wait for room; it raises what
    refuses any of them. The first failure ends them all.
    """
    if len(requests) == 1:
        async with engine.generate(requests[0]) as generation:
            yield (Step(0, generation, delta) async for delta in generation)
        return
    sender, receiver = trio.open_memory_channel[Step](0)
    begun = trio.Event()
    waiting = set(range(len(requests)))

    async def run(index: int, request: GenerationRequest, steps: trio.MemorySendChannel[Step]) -> None:
        async with steps, engine.generate(request) as generation:
            waiting.discard(index)
            if not waiting:
                begun.set()
            async for delta in generation:
                begun.set()
                await steps.send(Step(index, generation, delta))

    async with trio.open_nursery() as nursery, receiver:
        for index, request in enumerate(requests):
            nursery.start_soon(run, index, request, sender.clone())
        sender.close()
        await begun.wait()
        yield receiver
