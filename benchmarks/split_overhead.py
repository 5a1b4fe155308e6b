"""What a split costs: a decoded token's time, less what the stages and the head compute in it.

One stream through two node processes on this machine, driven without HTTP: so it is the software that costs, not a
network. What HTTP streaming adds is measured in rounds that alternate with those, its client a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import torch
import trio
from _measure import MODEL, QUESTION, answer_lines, local_cluster, machine, open_worker, spread, verdict

from core.cli.serve import Server
from core.coordinator.head import Head
from core.coordinator.route import Route, Ticket
from core.errors import ChannelClosed
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation, GenerationRequest
from core.interfaces.transport import Channel
from core.link import Link, open_link
from core.plugins import PluginHost
from core.protocol.codec import Packet
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import HiddenState, Run, RunDecode
from core.runtime.compute import open_compute_thread

GOAL_MS = 1.5
HOPS = 3
WIDTH = 576
"""The hidden size of the demo's model."""
CALLS = 100


@dataclass
class Probe:
    """What a generation's decode steps took, in milliseconds, in order: `route` includes `stages`."""

    head: list[float] = field(default_factory=list)
    route: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measures around Head's calls, in the compute thread, and from a batch's start to its answer."""
        step, embed, register, succeed = Head.step, Head.embed, Route._register, Ticket.succeed
        started: dict[int, float] = {}

        def timed_step(head: Head, *args: Any) -> Any:
            began = time.perf_counter()
            result = step(head, *args)
            self.head.append(since(began))
            return result

        def timed_embed(head: Head, *args: Any) -> Any:
            began = time.perf_counter()
            result = embed(head, *args)
            if self.head:
                self.head[-1] += since(began)
            return result

        def timed_register(route: Route, batch: Run) -> tuple[str, Ticket]:
            request_id, ticket = register(route, batch)
            if isinstance(batch, RunDecode):
                started[id(ticket)] = time.perf_counter()
            return request_id, ticket

        def timed_succeed(ticket: Ticket, result: HiddenState) -> None:
            if id(ticket) in started:
                self.route.append(since(started.pop(id(ticket))))
                self.stages.append(sum(result.compute_us) / 1e3)
            succeed(ticket, result)

        Head.step, Head.embed = timed_step, timed_embed
        Route._register, Ticket.succeed = timed_register, timed_succeed
        try:
            yield
        finally:
            Head.step, Head.embed, Route._register, Ticket.succeed = step, embed, register, succeed


@dataclass
class Figures:
    """Per decoded token, in milliseconds; `http` per token of a round."""

    walls: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    on_route: list[float] = field(default_factory=list)
    direct_rounds: list[float] = field(default_factory=list)
    http_rounds: list[float] = field(default_factory=list)

    def add(self, walls: list[float], probe: Probe) -> None:
        """Of one generation. The first step of `probe.head` belongs to the prefill."""
        for wall, route, stages, head in zip(walls, probe.route, probe.stages, probe.head[1:], strict=True):
            self.overheads.append(wall - stages - head)
            self.on_route.append(route - stages)
        self.walls += walls
        self.stages += probe.stages
        self.heads += probe.head[1:]


def since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)


async def measure(server: Server, rounds: int, tokens: int) -> Figures:
    figures = Figures()
    async with open_worker(__file__, "--as-client", server.url) as client:
        await client.ask("8")
        for _ in range(rounds):
            probe = Probe()
            with probe.attached():
                walls, mean = await times_between_tokens(server, tokens)
            figures.add(walls, probe)
            figures.direct_rounds.append(mean)
            figures.http_rounds.append(await client.ask(str(tokens)))
    return figures


async def times_between_tokens(server: Server, tokens: int) -> tuple[list[float], float]:
    """Milliseconds from each token to the next; and per token, as the HTTP client counts them."""
    request = GenerationRequest(
        Conversation(({"role": "user", "content": QUESTION},)), max_tokens=tokens, temperature=0.0
    )
    async with server.coordinator.generate(request) as generation:
        deltas = [(time.perf_counter(), delta) async for delta in generation]
    walls = [1e3 * (after - before) for (before, _), (after, _) in pairwise(deltas)]
    return walls, per_token([stamp for stamp, delta in deltas if delta.text], len(deltas))


def per_token(stamps: list[float], tokens: int) -> float:
    """Milliseconds, from the first text to the last."""
    return 1e3 * (stamps[-1] - stamps[0]) / (tokens - 1)


def be_http_client(url: str) -> None:
    """Answers a number of tokens with the milliseconds per token."""
    with httpx.Client(base_url=url, timeout=60) as client:
        answer_lines(lambda line: _streamed(client, int(line)))


def _streamed(client: httpx.Client, tokens: int) -> float:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stamps, completion = [], 0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                stamps.append(time.perf_counter())
            completion = (event["usage"] or {}).get("completion_tokens", completion)
    return per_token(stamps, completion)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step's parts cost by themselves, in milliseconds, when the processor's caches hold nothing of them."""

    crossing: float
    message: float
    message_from_cache: float

    @property
    def prediction(self) -> float:
        return HOPS * (self.message + self.crossing)


async def measure_parts(server: Server, packet: Packet) -> Parts:
    """Each call comes after reading as much memory as a stage reads for a token."""
    torch.set_num_threads(1)
    weights = torch.zeros(max(node.weight_bytes for node in server.coordinator.status().nodes) // 4)
    async with open_compute_thread("benchmark") as compute, open_echo() as link:

        async def round_trip() -> None:
            await link.send(packet.message, packet.request_id)
            await link.receive()

        return Parts(
            crossing=await median_of(partial(compute.run, int), before=weights.sum),
            message=await median_of(round_trip, before=weights.sum) / 2,
            message_from_cache=await median_of(round_trip) / 2,
        )


async def median_of(call: Callable[[], Awaitable[Any]], before: Callable[[], Any] = int) -> float:
    times = []
    for _ in range(CALLS):
        before()
        started = time.perf_counter()
        await call()
        times.append(since(started))
    return statistics.median(times)


def decode_message(width: int, wire: DType) -> Packet:
    hidden = Tensor(wire, 1, width, bytes(width * wire.itemsize))
    return Packet(RunDecode(1, [Segment(1, 100, 1, 1)], hidden, [1000]), "1")


@asynccontextmanager
async def open_echo() -> AsyncIterator[Link]:
    """A link to another process, which sends back whatever comes."""
    transport = PluginHost.installed().transports.get("trio-websocket")
    async with open_worker(__file__, "--as-echo") as worker:
        port = await worker.ask()
        async with transport.dial("127.0.0.1", port, timeout=5) as channel, open_link(channel) as link:
            yield link


def be_echo() -> None:
    async def echo(channel: Channel) -> None:
        async with open_link(channel) as link:
            try:
                while True:
                    packet = await link.receive()
                    await link.send(packet.message, packet.request_id)
            except ChannelClosed:
                return

    async def main() -> None:
        transport = PluginHost.installed().transports.get("trio-websocket")
        async with trio.open_nursery() as nursery:
            port = await nursery.start(transport.listen, "127.0.0.1", 0, echo)
            await trio.to_thread.run_sync(answer_lines, lambda _: port, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()

    trio.run(main)


def report(dtype: DType, wire: str, figures: Figures, parts: Parts) -> None:
    elsewhere = [whole - route for whole, route in zip(figures.overheads, figures.on_route, strict=True)]
    http = [over - under for over, under in zip(figures.http_rounds, figures.direct_rounds, strict=True)]
    overhead = statistics.median(figures.overheads)
    print(f"\n{dtype}, wire {wire}: {len(figures.walls)} tokens, {len(figures.direct_rounds)} rounds; ms per token")
    print(f"wall        {spread(figures.walls)}")
    print(f"stages      {spread(figures.stages)}")
    print(f"head        {spread(figures.heads)}")
    print(f"overhead    {spread(figures.overheads)}")
    print(f"  route     {spread(figures.on_route)}  (3 messages, a call into each node's compute thread)")
    print(f"  session   {spread(elsewhere)}  (a call into the head's compute thread, and the caller)")
    print(
        f"predicted   {parts.prediction:.2f} = {HOPS} x ({parts.message:.2f} for a message to another process + "
        f"{parts.crossing:.2f} for a call into a thread, both after reading a stage's weights; "
        f"from cache a message takes {parts.message_from_cache:.2f})"
    )
    print(f"HTTP adds   {spread(http)}")
    print(verdict(f"median overhead <= {GOAL_MS} ms", overhead <= GOAL_MS))


async def main(options: argparse.Namespace) -> None:
    print(machine())
    for dtype in options.dtype:
        async with local_cluster(dtype, options.wire_dtype, quant=options.quant, transport=options.transport) as server:
            status = server.coordinator.status()
            figures = await measure(server, options.rounds, options.tokens)
            parts = await measure_parts(server, decode_message(WIDTH, DType(status.wire_dtype)))
        report(dtype, status.wire_dtype, figures, parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", type=DType, nargs="+", default=[DType.FP32, DType.BF16, DType.FP16])
    parser.add_argument("--wire-dtype", default="auto", choices=["auto", *DType])
    parser.add_argument("--quant", default="fp16")
    parser.add_argument("--transport", default="trio-websocket")
    parser.add_argument("--as-client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--as-echo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_client:
        be_http_client(arguments.as_client)
    elif arguments.as_echo:
        be_echo()
    else:
        trio.run(main, arguments)
