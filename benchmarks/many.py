"""Many at once: eight streams beside one, tokens that come while a long prompt is prefilled, a chat's second turn.

The demo's model on two local node processes of one compute thread each, driven without HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from _measure import local_cluster, machine, spread, verdict

from core.coordinator.coordinator import Coordinator
from core.interfaces.dtypes import DType
from core.interfaces.engine import Delta, GenerationRequest

STREAMS = 8
TOKENS = 64
LONG_PROMPT = 2000
PROSE = Path(__file__).with_name("prose.txt")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", type=DType, default=DType.FP32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["streams", "gap", "turns"])
    asked = parser.parse_args()
    print(machine())
    parts = {"streams": streams, "gap": gap, "turns": turns}
    for name, part in parts.items():
        if asked.only in (None, name):
            await part(asked.dtype, asked.rounds)


async def streams(dtype: DType, rounds: int) -> None:
    """One stream, then eight, alternating."""
    ratios, ones, manys = [], [], []
    async with local_cluster(dtype, speculation=False, prefix_cache=False) as server:
        prompts = await prose(server.coordinator, STREAMS, 40)
        for _ in range(rounds):
            ones.append(await rate(server.coordinator, prompts[:1]))
            manys.append(await rate(server.coordinator, prompts))
            ratios.append(manys[-1] / ones[-1])
    print(f"one stream  {spread(ones, 'tokens/s', 1)} ({dtype})")
    print(f"{STREAMS} streams   {spread(manys, 'tokens/s', 1)}")
    print(f"ratio       {spread(ratios)}")
    print(verdict("8 streams together >= 4 x one", statistics.median(ratios) >= 4))


async def rate(coordinator: Coordinator, prompts: list[tuple[int, ...]]) -> float:
    """Decoded tokens per second of all prompts together, from the first token of the last that begins."""
    times: list[list[float]] = [[] for _ in prompts]
    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(prompts):
            nursery.start_soon(collect, coordinator, endless(prompt, TOKENS), times[index].append)
    began, ended = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(began < at <= ended for own in times for at in own) / (ended - began)


async def gap(dtype: DType, rounds: int) -> None:
    """The gaps between a stream's tokens alone, and while another prefills 2,000 tokens."""
    ratios, alone, beside = [], [], []
    async with local_cluster(dtype, speculation=False, prefix_cache=False) as server:
        [short] = await prose(server.coordinator, 1, 40)
        [long] = await prose(server.coordinator, 1, LONG_PROMPT)
        for _ in range(rounds):
            async with talking(server.coordinator, short) as times:
                await until(lambda: len(times) >= 40)
                first = len(times)
                await collect(server.coordinator, endless(long, 1), lambda _: None)
                last = len(times)
            alone.append(p95(times[5:first]))
            beside.append(p95(times[first - 1 : last]))
            ratios.append(beside[-1] / alone[-1])
    print(f"gap alone   p95 {spread(alone, 'ms', 1)} ({dtype})")
    print(f"gap beside  p95 {spread(beside, 'ms', 1)} while {LONG_PROMPT} tokens are prefilled")
    print(f"ratio       {spread(ratios)}")
    print(verdict("p95 gap beside a long prefill <= 3 x without", statistics.median(ratios) <= 3))


async def turns(dtype: DType, rounds: int) -> None:
    """TTFT of a chat's first turn of 2,000 tokens, and of its second."""
    ratios, firsts, seconds = [], [], []
    async with local_cluster(dtype) as server:
        for prompt in await prose(server.coordinator, rounds, LONG_PROMPT):
            first, answer = await ttft(server.coordinator, prompt)
            second, _ = await ttft(server.coordinator, (*prompt, *answer, *prompt[:30]))
            firsts.append(first)
            seconds.append(second)
            ratios.append(second / first)
    print(f"first turn  TTFT {spread(firsts, 's')} ({dtype}, {LONG_PROMPT} tokens)")
    print(f"second turn TTFT {spread(seconds, 's')}")
    print(f"ratio       {spread(ratios, digits=3)}")
    print(verdict("second turn's TTFT <= 0.15 x the first's", statistics.median(ratios) <= 0.15))


async def ttft(coordinator: Coordinator, prompt: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Seconds to the first token, and the tokens of the answer."""
    began, first, answer = time.perf_counter(), 0.0, []
    request = GenerationRequest(prompt, max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
    async with coordinator.generate(request) as generation:
        async for delta in generation:
            first = first or time.perf_counter() - began
            answer += [each.token for each in delta.logprobs]
    return first, tuple(answer)


@asynccontextmanager
async def talking(coordinator: Coordinator, prompt: tuple[int, ...]) -> AsyncIterator[list[float]]:
    """When the tokens came of a stream that goes on during the block."""
    times: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect, coordinator, endless(prompt, 2000), times.append)
        yield times
        nursery.cancel_scope.cancel()


async def collect(coordinator: Coordinator, request: GenerationRequest, note: Callable[[float], Any]) -> None:
    """Notes when each token came."""

    def came(delta: Delta, before: int) -> None:
        for _ in range(delta.tokens - before):
            note(time.perf_counter())

    tokens = 0
    async with coordinator.generate(request) as generation:
        async for delta in generation:
            came(delta, tokens)
            tokens = delta.tokens


def endless(prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)


async def prose(coordinator: Coordinator, many: int, length: int) -> list[tuple[int, ...]]:
    """Prompts of `length` tokens, each of another part of the text."""
    tokens = await coordinator.tokenize(PROSE.read_text())
    step = max(1, (len(tokens) - length) // many)
    return [tokens[start : start + length] for start in range(0, many * step, step)]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def p95(times: list[float]) -> float:
    """Of the gaps between them, in milliseconds."""
    return 1000 * statistics.quantiles([later - earlier for earlier, later in pairwise(times)], n=20)[-1]


if __name__ == "__main__":
    trio.run(main)
