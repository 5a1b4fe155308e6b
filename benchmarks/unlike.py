"""Whether the planner's plan beats `balanced`, and the equal split, by the factor that it predicted.

Five hosts in network namespaces, with a process each: the coordinator, two nodes that are offered too little memory for
the whole model, one far away, and one that has to share its core with a busy program, which goes first (`nice`). The
cluster first serves the equal split, so that all layers and links are measured; then its planner says what it would do,
and what each of the three plans would bring. Each is then served in turn, by the same node processes. Needs Linux, root
and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from _measure import MODEL, machine, spread, until_ready, verdict
from prediction import BUSY, SHARED, predicted_while_idle, seconds_per_token

from core.cli.demo_model import demo_model
from core.cli.serve import Server, serving
from core.coordinator.planning import planned
from core.coordinator.settings import CoordinatorSettings
from core.errors import CoreError
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.planner import Plan, PlanRequest, StagePlan
from core.plugins import PluginHost
from core.testing.hosts import Host, Network, can_have_hosts, open_hosts
from core.trust.invite import new_invite
from core.trust.state_dir import StateDir

PORT = 7001
ALONE = ("taskset", "-c", "0")
"""On the core that the busy program leaves alone: one at a time computes there."""
GOAL = 0.2
START_SECONDS = 180


@dataclass(frozen=True)
class Friend:
    """A node: what its command begins with, what it offers, and how far away it is."""

    name: str
    memory_gb: float
    before: Sequence[str] = ALONE
    delay_ms: float = 0.0


FRIENDS = (
    Friend("beside", 0.45),
    Friend("busy", 1.2, before=(*SHARED, "nice", "-n", "5")),
    Friend("far", 1.1, delay_ms=15.0),
    Friend("near", 0.45),
)
ROUTES = "measured", "balanced", "equal"
"""The plans, by who makes them."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=3, help="of each plan in each round")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.coordinator is not None:
        await coordinate(**json.loads(asked.coordinator))
        return
    if not can_have_hosts():
        print("network namespaces can't be made here")
        return
    print(machine(), flush=True)
    async with open_cluster() as cluster:
        named = await cluster.ask({}, asked.tokens, 1)
        found = await cluster.ask(named["plans"]["equal"], asked.tokens, asked.answers)
        plans, predicted = found["plans"], found["predicted"]
        show(found)
        measured: dict[str, list[float]] = {name: [] for name in ROUTES}
        for _ in range(asked.rounds):
            for name in ROUTES:
                answers = await cluster.ask(plans[name], asked.tokens, asked.answers)
                measured[name].append(statistics.median(answers["seconds"]))
                print(f"{name:<9} {1000 * measured[name][-1]:.1f} ms per token", flush=True)
    report(predicted, measured)


def show(found: Mapping[str, Any]) -> None:
    for node_id, seconds in found["rows"].items():
        print(f"{called(node_id):<9} {1000 * seconds:.3f} ms for a layer and row")
    wires = [f"{'-'.join(map(called, ends))} {1000 * seconds:.2f} ms" for *ends, seconds in found["wires"]]
    print(f"wires     {', '.join(wires)}")
    for name in ROUTES:
        layers = ", ".join(f"{called(node_id)} [{a}, {b})" for node_id, (a, b) in found["plans"][name].items())
        print(f"{name:<9} {layers}; predicted {1000 * found['predicted'][name]:.1f} ms per token", flush=True)


def called(node_id: str) -> str:
    """Without the part of its key that is in it."""
    return node_id.rpartition("-")[0]


def report(predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]]) -> None:
    for name in ROUTES:
        print(f"{name:<9} measured  {spread([1000 * seconds for seconds in measured[name]], 'ms per token', 1)}")
    for name in ROUTES[1:]:
        foreseen = predicted[name] / predicted["measured"]
        factors = [other / own for other, own in zip(measured[name], measured["measured"], strict=True)]
        print(f"{name:<9} takes {foreseen:.2f} x as long, says the planner; measured {spread(factors, 'x')}")
        off = abs(statistics.median(factors) / foreseen - 1)
        print(verdict(f"{name}: the factor within {GOAL:.0%}", off <= GOAL))


class Cluster:
    """Nodes that join whichever coordinator runs, one after another, on the first host."""

    def __init__(self, network: Network, folder: Path, nursery: trio.Nursery) -> None:
        self._host, *self._others = network.hosts
        self._folder = folder
        self._nursery = nursery
        self._invited = False

    async def ask(self, pins: Mapping[str, Sequence[int]], tokens: int, answers: int) -> Any:
        """What a coordinator tells that serves so many answers, on the nodes with those layers, or on all of them."""
        told = {"address": self._host.address, "model": str(demo_model()), "pins": pins}
        words = [__file__, "--coordinator", json.dumps({**told, "tokens": tokens, "answers": answers})]
        command = [*ALONE, *self._host.command(sys.executable, *words)]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, env=self._environment("host"))
        assert process.stdout is not None
        received = b""
        async for chunk in process.stdout:
            received += chunk
            if received and not self._invited:
                self._invite()
        if await process.wait():
            raise CoreError("the coordinator ended", "its error is above")
        return json.loads(received.splitlines()[-1])

    def _invite(self) -> None:
        self._invited = True
        state = StateDir.open(self._folder / "host" / "state")
        for friend, host in zip(FRIENDS, self._others, strict=True):
            self._nursery.start_soon(self._join, friend, host, str(new_invite(state, 3600, friend.name)[1]))

    async def _join(self, friend: Friend, host: Host, link: str) -> None:
        words = ["-m", "core", "node", "--join", "-", "--threads", "1", "--max-memory-gb", str(friend.memory_gb)]
        await trio.run_process(
            [*friend.before, *host.command(sys.executable, *words, "--log-level", "warning")],
            stdin=f"{link}\n".encode(),
            stdout=subprocess.DEVNULL,
            check=False,
            env=self._environment(friend.name),
        )

    def _environment(self, name: str) -> dict[str, str]:
        """A machine has a state and a cache of its own."""
        folder = self._folder / name
        return {**os.environ, "CORE_STATE_DIR": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}


@asynccontextmanager
async def open_cluster() -> AsyncIterator[Cluster]:
    far = {number: friend.delay_ms / 1000 for number, friend in enumerate(FRIENDS, 1) if friend.delay_ms}
    with tempfile.TemporaryDirectory() as folder:
        async with open_hosts(1 + len(FRIENDS), far) as network, trio.open_nursery() as nursery:
            nursery.start_soon(trio.run_process, BUSY)
            yield Cluster(network, Path(folder), nursery)
            nursery.cancel_scope.cancel()


async def coordinate(address: str, model: str, pins: Mapping[str, Sequence[int]], tokens: int, answers: int) -> None:
    """On the coordinator's host: serves, and prints what came of it."""
    nodes = len(pins or FRIENDS)
    settings = CoordinatorSettings(
        source=Source(model),
        served_model_name=MODEL,
        node_host="0.0.0.0",
        node_port=PORT,
        advertise=(address,),
        min_nodes=nodes,
        max_nodes=nodes,
        dtype=DType.FP32,
        quant="fp16",
        threads=1,
        speculation=False,
        prefix_cache=False,
        rebalance=False,
        pins={node_id: range(*layers) for node_id, layers in pins.items()},
    )
    async with serving(settings, "127.0.0.1", 0, ApiSettings(), lambda line: None) as server:
        print("nodes may join", flush=True)
        await until_ready(server, START_SECONDS)
        all_serve = nodes == len(FRIENDS)
        if all_serve:
            await predicted_while_idle(server)
        seconds = [await seconds_per_token(server, tokens) for _ in range(answers)]
        print(json.dumps({"seconds": seconds, **(weighed(server) if all_serve else {})}), flush=True)


def weighed(server: Server) -> dict[str, Any]:
    """What each plan is, and is predicted to bring, by all that the cluster knows of its machines."""
    live = server.coordinator._live
    assert live is not None and live.supervisor is not None
    planning, planners = live.supervisor.planning, PluginHost.installed().planners
    request = replace(planning._request(live.members.all(), ()), min_stages=1, max_stages=None, pins={})
    plans = {name: planned(planners.get(name), request) for name in ROUTES[:2]} | {"equal": equal_split(request)}
    return {
        "plans": {name: {s.node_id: (s.start, s.end) for s in plan.stages} for name, plan in plans.items()},
        "predicted": {name: planning._predict(plan, request).token_seconds for name, plan in plans.items()},
        "rows": {node.node_id: statistics.mean(node.row_seconds) for node in request.candidates},
        "wires": [(*ends, wire.seconds) for ends, wire in request.wires.items()],
    }


def equal_split(request: PlanRequest) -> Plan:
    """As many layers for each, in the order of their names."""
    names, layers = sorted(node.node_id for node in request.candidates), len(request.layer_bytes)
    borders = [layers * number // len(names) for number in range(len(names) + 1)]
    stages = zip(names, pairwise(borders), strict=True)
    return Plan(tuple(StagePlan(name, start, end, 0) for name, (start, end) in stages))


if __name__ == "__main__":
    trio.run(main)
