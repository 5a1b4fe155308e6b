"""Hops with 20 ms between them, one way: what one stream gets, what four get together, and what guessing ahead saves.

The demo's model on two local node processes; every message between two processes arrives 20 ms late. Without HTTP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio
from _measure import local_cluster, machine, spread, verdict
from many import prose, rate

from core.cli.serve import Server
from core.coordinator.coordinator import Coordinator
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation, GenerationRequest

HOPS = 3
STREAMS = 4
EDIT = "Repeat the following text word for word, and change only the name of the keeper to Martha.\n\n"
STORY = "Tell a long story about a lighthouse keeper and the sea."
EDIT_TOKENS, STORY_TOKENS = 150, 150


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", type=DType, default=DType.FP32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--only", choices=["streams", "guessing"])
    asked = parser.parse_args()
    print(machine())
    with far_apart(asked.delay_ms):
        if asked.only != "guessing":
            await streams(asked.dtype, asked.rounds, asked.delay_ms)
        if asked.only != "streams":
            await guessing(asked.dtype, asked.rounds)


@contextmanager
def far_apart(delay_ms: float) -> Iterator[None]:
    """The transport "distant" is installed meanwhile, for this process and those that it starts."""
    source = Path(__file__).parent / "distant"
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "distant_transport-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: distant-transport\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[core.plugins]\ndistant = distant_transport\n")
        sys.path[:0] = [folder, str(source)]
        paths = [folder, str(source), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ["DISTANT_MS"] = str(delay_ms)
        yield


@asynccontextmanager
async def distant_cluster(dtype: DType, *, speculation: bool) -> AsyncIterator[Server]:
    async with local_cluster(dtype, transport="distant", speculation=speculation, prefix_cache=False) as server:
        yield server


async def streams(dtype: DType, rounds: int, delay_ms: float) -> None:
    """One stream, then four, alternating; and the part of what physics allows that one stream gets."""
    ones, manys, ratios, parts = [], [], [], []
    async with distant_cluster(dtype, speculation=False) as server:
        prompts = await prose(server.coordinator, STREAMS, 40)
        for _ in range(rounds):
            ones.append(await rate(server.coordinator, prompts[:1]))
            manys.append(await rate(server.coordinator, prompts))
            ratios.append(manys[-1] / ones[-1])
            compute_ms = sum(hop.compute_ms for hop in server.coordinator.status().hops)
            parts.append(ones[-1] * (HOPS * delay_ms + compute_ms) / 1000)
    print(f"one stream  {spread(ones, 'tokens/s', 1)} ({dtype}, {HOPS} hops of {delay_ms:g} ms)")
    print(f"{STREAMS} streams   {spread(manys, 'tokens/s', 1)}")
    print(f"ratio       {spread(ratios)}")
    print(verdict("4 streams >= 3.5 x one", statistics.median(ratios) >= 3.5))
    print(f"one stream  {spread(parts)} of 1 / (delays + compute of the stages)")
    print(verdict("one stream >= 0.9 of that", statistics.median(parts) >= 0.9))


async def guessing(dtype: DType, rounds: int) -> None:
    """Decode speed with and without drafts, on a text that is to be edited and on a free one."""
    edits: dict[bool, list[float]] = {True: [], False: []}
    stories: dict[bool, list[float]] = {True: [], False: []}
    async with distant_cluster(dtype, speculation=True) as guesses, distant_cluster(dtype, speculation=False) as plain:
        text = await plain.coordinator.detokenize((await prose(plain.coordinator, 1, 160))[0])
        for _ in range(rounds):
            for server, speculates in ((plain, False), (guesses, True)):
                edits[speculates].append(await speed(server.coordinator, EDIT + text, EDIT_TOKENS))
                stories[speculates].append(await speed(server.coordinator, STORY, STORY_TOKENS))
    for name, found, goal in (("edit", edits, 2.0), ("free text", stories, 0.97)):
        ratios = [with_it / without for with_it, without in zip(found[True], found[False], strict=True)]
        print(f"{name:<11} {spread(found[False], 'tokens/s', 1)} plain")
        print(f"{name:<11} {spread(found[True], 'tokens/s', 1)} guessing ahead")
        print(f"ratio       {spread(ratios)}")
        print(verdict(f"{name}: >= {goal:g} x plain decode", statistics.median(ratios) >= goal))


async def speed(coordinator: Coordinator, question: str, tokens: int) -> float:
    """Tokens per second after the first of an answer."""
    request = GenerationRequest(Conversation(({"role": "user", "content": question},)), tokens, temperature=0)
    began, ended, decoded = 0.0, 0.0, 0
    async with coordinator.generate(request) as generation:
        async for delta in generation:
            ended = time.perf_counter()
            began = began or ended
            decoded = delta.tokens
    return (decoded - 1) / (ended - began)


if __name__ == "__main__":
    trio.run(main)
