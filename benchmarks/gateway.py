"""What the gateway costs: streams of a fake engine to 32 clients, and one delta's way over the bridge.

Server and engine share one core; the clients run in a process of their own, on another where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from _measure import machine, spread, verdict

from core.gateway.bridge import Bridge
from core.gateway.server import serve_http
from core.interfaces.engine import Delta, GenerationRequest, ModelCard

CLIENTS = 32
GOAL_DELTAS = 2_000
GOAL_MICROSECONDS = 150
PATIENCE_SECONDS = 60


class FakeEngine:
    """Gives every session a delta a step, as fast as they are taken."""

    served_model = "fake"
    created = 0

    def __init__(self, deltas: int) -> None:
        self._deltas = deltas

    def card(self) -> ModelCard:
        return ModelCard(self.served_model, self.created, context_length=4096, vocab_size=256, chat_template=None)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Any]:
        yield FakeGeneration(self._deltas)


class FakeGeneration:
    prompt_tokens = 5
    cached_tokens = 0
    prompt_logprobs = ()

    def __init__(self, deltas: int) -> None:
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for number in range(1, self._deltas + 1):
            await trio.lowlevel.checkpoint()
            yield Delta(" token", number, "stop" if number == self._deltas else None)


async def stream_to_clients(deltas: int, core: int) -> tuple[float, float]:
    """Deltas a second, and the server's CPU seconds for each; the clients run on `core`."""
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve_http, FakeEngine(deltas), "127.0.0.1", 0)
            clients = [sys.executable, __file__, "--clients-of", f"{host}:{port}", "--core", str(core)]
            before = time.process_time()
            told = await trio.run_process(clients, capture_stdout=True)
            spent = time.process_time() - before
            nursery.cancel_scope.cancel()
    seconds, events = json.loads(told.stdout)
    assert events == CLIENTS * (deltas + 2), "a role, the deltas, and [DONE]"
    return CLIENTS * deltas / seconds, spent / (CLIENTS * deltas)


async def read_streams(host: str, port: int) -> tuple[float, int]:
    """Seconds from the request of 32 streams to their ends, and how many events came."""
    body = json.dumps({"model": "fake", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    events = 0

    async def read() -> None:
        nonlocal events
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(head.encode() + body)
            async for some in stream:
                events += some.count(b"data: ")

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(read)
    return time.perf_counter() - started, events


async def cross(items: int, paced: bool) -> float:
    """CPU seconds of this process for an item's way from a trio task to an asyncio one.

    Paced, each item waits until the one before was read, as when tokens come slowly; else they come as fast as they go.
    """
    read = trio.Semaphore(0)

    @asynccontextmanager
    async def open_producer() -> AsyncIterator[AsyncIterator[int]]:
        yield produce()

    async def produce() -> AsyncIterator[int]:
        for number in range(items):
            await trio.lowlevel.checkpoint()
            yield number
            if paced:
                await read.acquire()

    async def consume(bridge: Bridge, token: trio.lowlevel.TrioToken) -> float:
        async with bridge.open(open_producer) as crossing:
            before = time.process_time()
            async for _ in crossing:
                if paced:
                    token.run_sync_soon(read.release)
            return (time.process_time() - before) / items

    async with trio.open_nursery() as nursery:
        bridge, token = Bridge(nursery), trio.lowlevel.current_trio_token()
        return await trio.to_thread.run_sync(lambda: asyncio.run(consume(bridge, token)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deltas", type=int, default=400, help="of each client's stream")
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients_of:
        host, port = options.clients_of.split(":")
        pin(options.core)
        print(json.dumps(trio.run(read_streams, host, int(port))))
        return
    print(machine())
    first, *_, last = sorted(cores()) * 2
    pin(first)
    rates, costs = zip(*(trio.run(stream_to_clients, options.deltas, last) for _ in range(options.rounds)), strict=True)
    print(f"stream      {CLIENTS} clients: {spread(rates, 'deltas/s', 0)}")
    print(f"            CPU of server and engine: {spread([cost * 1e6 for cost in costs], 'us a delta', 0)}")
    flowing = [trio.run(cross, 20_000, False) * 1e6 for _ in range(options.rounds)]
    paced = [trio.run(cross, 5_000, True) * 1e6 for _ in range(options.rounds)]
    print(f"bridge      items in a flow: {spread(flowing, 'us CPU each', 0)}")
    print(f"            one by one: {spread(paced, 'us CPU each', 0)}")
    print(verdict(f"{GOAL_DELTAS} deltas/s", statistics.median(rates) >= GOAL_DELTAS))
    print(verdict(f"{GOAL_MICROSECONDS} us on the bridge", statistics.median(paced) <= GOAL_MICROSECONDS))


def cores() -> set[int]:
    """Those that this process may use, where the system tells."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    main()
