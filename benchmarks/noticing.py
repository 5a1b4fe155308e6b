"""How soon a cluster notices that a node is gone, and serves again when it is back.

A tiny model on two node processes; the second is killed, stopped (as a machine that sleeps), and left by a coordinator
that starts again.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from _measure import machine, spread, verdict

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import COORDINATOR, Cluster, open_cluster

VICTIM = "second"
HEARTBEAT_GOAL = 3.0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(Path(folder) / "model")
        async with open_cluster(model, "--dtype", "fp32", "--min-nodes", "2") as cluster:
            for name in ("first", VICTIM):
                await cluster.start_node(name)
            await cluster.wait_ready()
            for what, harm, heal in (
                ("kill -9", kill, start),
                ("SIGSTOP", stop, wake),
                ("coordinator killed", kill_coordinator, start_coordinator),
            ):
                await measure(cluster, what, harm, heal, asked.rounds)


Act = Callable[[Cluster], Awaitable[object]]


async def measure(cluster: Cluster, what: str, harm: Act, heal: Act, rounds: int) -> None:
    noticed, healed = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        await harm(cluster)
        if harm is not kill_coordinator:
            await cluster.wait_until(lambda status: status["state"] != "ready")
            noticed.append(time.perf_counter() - began)
        began = time.perf_counter()
        await heal(cluster)
        await cluster.wait_ready()
        healed.append(time.perf_counter() - began)
        names = sorted(node["node_id"] for node in (await cluster.status())["nodes"])
        assert names == ["first", VICTIM], f"no ghosts: {names}"
    if noticed:
        print(f"{what:<18}  noticed after {spread(noticed, 's')}")
        if harm is stop:
            print(verdict(f"noticed within {HEARTBEAT_GOAL:g} s and a heartbeat", max(noticed) <= HEARTBEAT_GOAL + 1))
    print(f"{what:<18}  serves again {spread(healed, 's')} after it is back")


async def kill(cluster: Cluster) -> None:
    await cluster.kill(VICTIM)


async def start(cluster: Cluster) -> None:
    await cluster.start_node(VICTIM)


async def stop(cluster: Cluster) -> None:
    await cluster.send_signal(VICTIM, signal.SIGSTOP)


async def wake(cluster: Cluster) -> None:
    await cluster.send_signal(VICTIM, signal.SIGCONT)


async def kill_coordinator(cluster: Cluster) -> None:
    await cluster.kill(COORDINATOR)


async def start_coordinator(cluster: Cluster) -> None:
    await cluster.start_coordinator()


if __name__ == "__main__":
    trio.run(main)
