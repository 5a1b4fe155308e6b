"""What a token of one stream is predicted to take, against what it takes: local clusters of the demo's model.

Two nodes, three, two of which one has a core with another busy program, and two of which one has another thread. The
first prediction is made of what nodes found while they were idle, the second of what serving has shown. Without HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio
from _measure import MODEL, QUESTION, machine, spread, until_ready, verdict

from core.cli.demo_model import demo_model
from core.cli.serve import Server, serving
from core.coordinator.settings import CoordinatorSettings
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation, GenerationRequest

PLAIN: tuple[str, ...] = ()
SHARED = ("taskset", "-c", "1")
BUSY = [*SHARED, sys.executable, "-c", "while True: pass"]
KINDS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "two nodes": [(PLAIN, 1)] * 2,
    "three nodes": [(PLAIN, 1)] * 3,
    "two, one with half a core": [(PLAIN, 1), (SHARED, 1)],
    "two, one with 2 threads": [(PLAIN, 1), (PLAIN, 2)],
}
"""What each node's command begins with, and its threads."""
GOAL = 0.2
IDLE_SECONDS = 60


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", type=DType, default=DType.FP32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    asked = parser.parse_args()
    print(machine())
    for kind in asked.only:
        async with cluster(asked.dtype, KINDS[kind]) as server:
            await report(server, kind, asked.rounds, asked.tokens)


@asynccontextmanager
async def cluster(dtype: DType, nodes: Sequence[tuple[tuple[str, ...], int]]) -> AsyncIterator[Server]:
    """Processes of this machine that join by themselves, once a token has passed through all of them."""
    settings = CoordinatorSettings(
        source=Source(str(demo_model())),
        served_model_name=MODEL,
        node_port=0,
        min_nodes=len(nodes),
        dtype=dtype,
        threads=1,
        speculation=False,
        prefix_cache=False,
    )
    async with (
        serving(settings, "127.0.0.1", 0, ApiSettings(), lambda line: None) as server,
        trio.open_nursery() as nursery,
    ):
        joining = [sys.executable, "-m", "core", "node", "--cluster-port", str(server.coordinator.node_port)]
        for number, (before, threads) in enumerate(nodes, 1):
            named = ["--node-id", f"node-{number}", "--threads", str(threads), "--log-level", "warning"]
            run = partial(trio.run_process, [*before, *joining, *named], stdout=subprocess.DEVNULL, check=False)
            nursery.start_soon(run)
            if before == SHARED:
                nursery.start_soon(trio.run_process, BUSY)
        await until_ready(server)
        yield server
        nursery.cancel_scope.cancel()


async def report(server: Server, kind: str, rounds: int, tokens: int) -> None:
    idle = await predicted_while_idle(server)
    measured = [await seconds_per_token(server, tokens) for _ in range(rounds)]
    status = server.coordinator.status()
    layers = ", ".join("[{}, {})".format(*node.layers) for node in status.nodes if node.layers)
    print(f"\n{kind}: layers {layers}; ms per token")
    print(f"measured    {spread([1000 * seconds for seconds in measured])} over {rounds} answers of {tokens} tokens")
    for when, found in (("idle", idle), ("serving", status.predicted_token_seconds)):
        ratios = [seconds / found for seconds in measured]
        print(f"predicted   {1000 * found:.2f} ({when}); measured / predicted {spread(ratios)}")
        off = abs(statistics.median(ratios) - 1)
        print(verdict(f"{when}: within {GOAL:.0%}", off <= GOAL))
    for node in status.nodes:
        print(f"{node.node_id:<11} {1000 * statistics.mean(node.row_seconds):.3f} ms for a layer and row")
    hops = ", ".join(f"{hop.node_id} computes {hop.compute_ms:.2f}, waits {hop.queue_ms:.2f}" for hop in status.hops)
    print(f"traced      {hops}, between hops {status.wire_ms:.2f}")
    print("wires       " + ", ".join(f"{'-'.join(wire.ends)} {1000 * wire.seconds:.2f} ms" for wire in status.wires))


async def predicted_while_idle(server: Server) -> float:
    """Once the nodes have timed their layers, and links are measured."""
    nodes = len(server.coordinator.status().nodes)
    for _ in range(10 * IDLE_SECONDS):
        if len(server.coordinator.status().wires) == 2 * nodes - 1:
            break
        await trio.sleep(0.1)
    return server.coordinator.status().predicted_token_seconds


async def seconds_per_token(server: Server, tokens: int) -> float:
    """Of an answer, after its first token."""
    request = GenerationRequest(Conversation(({"role": "user", "content": QUESTION},)), tokens, temperature=0)
    times = []
    async with server.coordinator.generate(request) as generation:
        async for _ in generation:
            times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("taskset is there on Linux alone")
    trio.run(main)
