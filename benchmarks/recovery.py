"""Machines that die in mid-answer: whether every text is what it would have been, and what each loss costs.

The demo's model on real processes: two that serve, and three spares. While eight streams run, one that serves is harmed
at a random token: killed, stopped (as a machine that sleeps), asked to leave, paused; or two are killed in a row, or
another joins and a new plan is asked for. Every stream must end, with the text that its question gets undisturbed.
Where it parts from that, the undisturbed text's two likeliest tokens must have been a near tie: batches of other rows
round differently. Bytes and seconds are those that nodes took to load layers for routes, at first and after each harm.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio
from _measure import machine, spread, verdict

from core.cli.demo_model import demo_model
from core.testing.cluster import COORDINATOR, Cluster, open_cluster

STREAMS = 8
NODES, NEEDED = 5, 4
"""Two serve; so many are started in all, and so many are there before a round begins."""
TOKENS = 32
QUESTIONS = (
    "Name three rivers.",
    "What is a lighthouse for?",
    "Write a short poem about rain.",
    "How do bees make honey?",
    "Why is the sky blue?",
    "Tell me about the moon.",
    "What do trains run on?",
    "Describe a good breakfast.",
)
NEAR_TIE = 0.02
"""In log probability: fp32 logits of SmolLM2, whose residual stream reaches 22,500, round apart by so much."""
NODE = Path(__file__).with_name("_pausing_node.py")
ROUND_SECONDS = 120.0
SETTLE_SECONDS = 60.0
LOSS_GOAL = 2.0


@dataclass(slots=True)
class Undisturbed:
    text: str
    pieces: list[str]
    margins: list[float]
    """By how much the likeliest token was ahead of the second."""

    def parts_at_a_near_tie(self, text: str) -> bool:
        agreed = next(
            (n for n, (a, b) in enumerate(zip(text, self.text, strict=False)) if a != b), min(len(text), len(self.text))
        )
        length = 0
        for index, piece in enumerate(self.pieces):
            length += len(piece)
            if length > agreed:
                return min(self.margins[max(0, index - 2) : index + 1]) < NEAR_TIE
        return False


@dataclass(slots=True)
class Stream:
    text: str = ""
    error: str = ""
    finished: bool = False
    tokens: int = 0
    gap: float = 0.0
    """The longest wait for a token."""
    doubled: bool = False
    reached: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class Loads:
    """What the coordinator has told of nodes' loads so far."""

    nbytes: int
    seconds: float

    @classmethod
    def of(cls, cluster: Cluster) -> Loads:
        output = next(program.output for program in cluster.programs if program.name == COORDINATOR)
        found = re.findall(r"node \S+ has layers \S+ \d+\): (\d+) bytes read in ([\d.]+) s", output)
        return cls(sum(int(nbytes) for nbytes, _ in found), max((float(s) for _, s in found), default=0.0))


@dataclass(slots=True)
class Bench:
    cluster: Cluster
    chance: random.Random
    serial: int = 0
    undisturbed: dict[str, Undisturbed] = field(default_factory=dict)

    async def start(self, count: int) -> None:
        """Nodes that pause on SIGUSR1."""
        for _ in range(count):
            self.serial += 1
            name = f"m{self.serial}"
            await self.cluster.start_program(name, NODE, "--node-id", name, str(self.cluster.node_port))

    async def settled(self, nodes: int) -> None:
        """A route serves, and so many nodes are there."""
        await self.cluster.wait_until(
            lambda status: status["state"] == "ready" and len(status["nodes"]) >= nodes, SETTLE_SECONDS
        )

    async def serving(self) -> list[str]:
        return [node["node_id"] for node in (await self.cluster.status())["nodes"] if node["layers"]]


async def kill(bench: Bench) -> None:
    await bench.cluster.kill(bench.chance.choice(await bench.serving()))


async def twice(bench: Bench) -> None:
    for victim in bench.chance.sample(await bench.serving(), 2):
        await bench.cluster.kill(victim)
        await trio.sleep(0.3)


async def stop(bench: Bench) -> None:
    await bench.cluster.send_signal(bench.chance.choice(await bench.serving()), signal.SIGSTOP)


async def leave(bench: Bench) -> None:
    await bench.cluster.send_signal(bench.chance.choice(await bench.serving()), signal.SIGTERM)


async def pause(bench: Bench) -> None:
    """For as long as it takes until nobody is served by it."""
    victim = bench.chance.choice(await bench.serving())
    await bench.cluster.send_signal(victim, signal.SIGUSR1)
    await bench.cluster.wait_until(lambda status: state_of(status, victim) == "paused", SETTLE_SECONDS)
    await bench.cluster.send_signal(victim, signal.SIGUSR1)


def state_of(status: dict[str, Any], node_id: str) -> str:
    return next((node["state"] for node in status["nodes"] if node["node_id"] == node_id), "gone")


async def rebalance(bench: Bench) -> None:
    async with bench.cluster.client() as client:
        (await client.post("/v1/cluster/rebalance")).raise_for_status()


async def join(bench: Bench) -> None:
    await bench.start(1)
    await rebalance(bench)


HARMS: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "kill": kill,
    "twice": twice,
    "stop": stop,
    "leave": leave,
    "pause": pause,
    "join": join,
    "rebalance": rebalance,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--harm", action="append", choices=HARMS, help="default: all")
    parser.add_argument("--standby", action="store_true", help="spare nodes hold layers in memory")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(machine())
    options = ["--quant", "fp16", "--dtype", "fp32", "--min-nodes", "2", "--max-nodes", "2", "--no-prefix-cache"]
    options += ["--standby"] if asked.standby else []
    async with open_cluster(demo_model(), *options) as cluster:
        bench = Bench(cluster, random.Random(asked.seed))
        await bench.start(NODES)
        await bench.settled(NODES)
        first = Loads.of(cluster)
        print(f"full load   {first.nbytes / 1e6:.0f} MB in {first.seconds:.2f} s, both nodes at once")
        for question in QUESTIONS:
            bench.undisturbed[question] = await ask_undisturbed(cluster, question)
        for name in asked.harm or HARMS:
            await measure(bench, name, asked.rounds)


async def measure(bench: Bench, name: str, rounds: int) -> None:
    counts: Counter[str] = Counter()
    gaps: list[float] = []
    loaded = Loads.of(bench.cluster).nbytes
    began = time.perf_counter()
    for _ in range(rounds):
        streams = await one_round(bench, HARMS[name])
        for question, stream in streams.items():
            counts[judge(bench.undisturbed[question], stream)] += 1
        gaps.append(max(stream.gap for stream in streams.values()))
        counts["KV left"] += await left_over(bench)
    total = rounds * STREAMS
    print(
        f"{name:<10}  {rounds} rounds of {STREAMS} streams in {time.perf_counter() - began:.0f} s: "
        + ", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if count)
    )
    read = (Loads.of(bench.cluster).nbytes - loaded) / rounds
    print(f"{name:<10}  longest wait for a token {spread(gaps, 's')}; {read / 1e6:.0f} MB read a round")
    print(verdict("every text as undisturbed, or parted at a near tie", counts["same"] + counts["near tie"] == total))
    print(verdict("nothing is left on any node", counts["KV left"] == 0))


async def one_round(bench: Bench, harm: Callable[[Bench], Awaitable[None]]) -> dict[str, Stream]:
    streams = {question: Stream() for question in QUESTIONS}
    at = bench.chance.randrange(1, TOKENS - 8)
    watched = streams[bench.chance.choice(QUESTIONS)]
    with trio.fail_after(ROUND_SECONDS):
        async with trio.open_nursery() as nursery:
            for question, stream in streams.items():
                nursery.start_soon(read, bench.cluster, question, stream, at)
            await watched.reached.wait()
            await harm(bench)
    await restore(bench)
    return streams


async def restore(bench: Bench) -> None:
    """As many healthy nodes as before: for each that is gone or stopped, another one is on its way."""
    alive = []
    for name, process in bench.cluster.processes().items():
        if process.status() == psutil.STATUS_STOPPED:
            process.kill()
        elif name != COORDINATOR:
            alive.append(name)
    serving = await bench.serving()
    for name in [name for name in alive if name not in serving][: max(0, len(alive) - NODES)]:
        await bench.cluster.kill(name)
    await bench.start(NODES - len(alive))
    await bench.settled(NEEDED)


def judge(undisturbed: Undisturbed, stream: Stream) -> str:
    if stream.error or not stream.finished:
        return f"ended with {stream.error or 'no word'}"
    if stream.doubled:
        return "told twice"
    if stream.text == undisturbed.text:
        return "same"
    return "near tie" if undisturbed.parts_at_a_near_tie(stream.text) else f"other text: {stream.text!r}"


async def left_over(bench: Bench) -> int:
    """Whether any node still holds KV a few seconds after the last stream."""
    try:
        await bench.cluster.wait_until(
            lambda status: status["sessions"] == 0 and all(node["kv_tokens"] == 0 for node in status["nodes"]), 10
        )
    except AssertionError:
        return 1
    return 0


async def read(cluster: Cluster, question: str, stream: Stream, at: int) -> None:
    body = {**asking(cluster, question), "stream": True, "stream_options": {"include_usage": True}}
    last = time.perf_counter()
    try:
        async with cluster.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    stream.finished = stream.finished or line == "data: [DONE]"
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    stream.error = event["error"]["message"]
                    return
                if event.get("usage"):
                    stream.doubled = event["usage"]["completion_tokens"] > TOKENS
                for choice in event["choices"]:
                    now = time.perf_counter()
                    stream.gap, last = max(stream.gap, now - last), now
                    stream.tokens += 1
                    stream.text += choice["delta"].get("content") or ""
                if stream.tokens >= at:
                    stream.reached.set()
    except httpx.HTTPError as error:
        stream.error = repr(error)
    finally:
        stream.reached.set()


async def ask_undisturbed(cluster: Cluster, question: str) -> Undisturbed:
    body = {**asking(cluster, question), "logprobs": True, "top_logprobs": 2}
    async with cluster.client() as client:
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    [choice] = answer["choices"]
    told: list[dict[str, Any]] = choice["logprobs"]["content"]
    margins = [each["top_logprobs"][0]["logprob"] - each["top_logprobs"][1]["logprob"] for each in told]
    return Undisturbed(choice["message"]["content"], [each["token"] for each in told], margins)


def asking(cluster: Cluster, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": cluster.model, "messages": messages, "temperature": 0, "max_tokens": TOKENS}


if __name__ == "__main__":
    trio.run(main)
