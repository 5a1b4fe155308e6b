"""What open pages cost the coordinator: its processor time with so many that watch, and with none, by turns.

A tiny model on two node processes. A page that is open follows the cluster's events: there is one a second, for the
free memory of nodes never stays the same.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import trio
from _measure import machine, spread, verdict

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import COORDINATOR, Cluster, open_cluster

GOAL_PERCENT = 3.0
EVENTS = "/v1/cluster/events?of=cluster"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(Path(folder) / "model")
        async with open_cluster(model, "--dtype", "fp32", "--min-nodes", "2") as cluster:
            for name in ("first", "second"):
                await cluster.start_node(name)
            await cluster.wait_ready()
            process = (await trio.to_thread.run_sync(cluster.processes))[COORDINATOR]
            costs, told = [], []
            for _ in range(asked.rounds):
                without = await percent(process, asked.seconds)
                async with OpenPages(cluster, asked.pages) as counts:
                    costs.append(await percent(process, asked.seconds) - without)
                    told.append(sum(counts) / len(counts) / asked.seconds)
            print(f"events      {spread(told)} a second for each page")
            print(f"{asked.pages} pages    {spread(costs)} % of a core more than none")
            print(verdict(f"{asked.pages} open pages cost less than {GOAL_PERCENT:g} %", max(costs) < GOAL_PERCENT))


async def percent(process: psutil.Process, seconds: float) -> float:
    """Of one core, that the process takes in the next seconds."""
    before = process.cpu_times()
    await trio.sleep(seconds)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / seconds


class OpenPages:
    """So many clients that follow the cluster, for the length of a block; gives how many events each was told."""

    def __init__(self, cluster: Cluster, pages: int) -> None:
        self._cluster = cluster
        self._counts = [0] * pages
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> list[int]:
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        for index in range(len(self._counts)):
            await nursery.start(self._follow, index)
        self._counts[:] = [0] * len(self._counts)
        return self._counts

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _follow(self, index: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self._cluster.client() as client, client.stream("GET", EVENTS) as answer:
            task_status.started()
            async for line in answer.aiter_lines():
                self._counts[index] += line.startswith("data: ")


if __name__ == "__main__":
    trio.run(main)
