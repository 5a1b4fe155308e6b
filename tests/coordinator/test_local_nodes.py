"""Nodes on the coordinator's own machine: what memory they have, and where they are told to connect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from core.coordinator.planning import USABLE
from core.interfaces.planner import Plan, PlanRequest
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity
from core.plugins import PluginHost
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, plugins_on

SECONDS = 60
FREE = 2**30


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The options with which local nodes would be started."""
    noted: list[Sequence[str]] = []

    async def note(_: Sequence[str], options: Sequence[str]) -> None:
        noted.append(options)

    monkeypatch.setattr("core.coordinator.live.run_local_nodes", note)
    return noted


def option(command: Sequence[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


async def test_local_nodes_share_what_was_free_before_anything_was_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, commands: list[Sequence[str]], inside: Any
) -> None:
    asked: list[PlanRequest] = []
    planner = type(PluginHost.installed().planners.get("balanced"))
    plan = planner.plan

    def noted(self: Any, request: PlanRequest) -> Plan:
        asked.append(request)
        return plan(self, request)

    monkeypatch.setattr(planner, "plan", noted)
    monkeypatch.setattr("core.coordinator.live.free_memory", lambda _: FREE)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3, local_nodes=2) as cluster:
            await cluster.start_node("local-1", max_memory=None)
            await cluster.start_node("local-2", max_memory=None)
            await cluster.start_node("friend", max_memory=FREE)
            await cluster.ready()
            builder = inside(cluster).generator.supervisor._builder
            share = int((FREE - builder.model.ends_bytes(builder.precision)) / 2 * USABLE)
    assert {node.node_id: node.memory for node in asked[-1].candidates} == {
        "local-1": share,
        "local-2": share,
        "friend": FREE,
    }


@pytest.mark.parametrize(
    ("node_host", "dialled", "peer_host"),
    [
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("::", "::1", "::"),
        ("localhost", "localhost", None),
        ("192.168.1.7", "192.168.1.7", None),
    ],
)
async def test_local_nodes_dial_an_address_at_which_the_coordinator_listens(
    model: Path, commands: list[Sequence[str]], node_host: str, dialled: str, peer_host: str | None
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, local_nodes=1, node_host=node_host) as cluster:
            await cluster.until(lambda _: bool(commands))
    [command] = commands
    assert option(command, "--cluster-host") == dialled
    assert option(command, "--peer-host") == peer_host


async def test_a_friends_node_reaches_a_local_one_directly(model: Path) -> None:
    """It dials the address at which it found the coordinator: the local node's own is no use to another machine."""
    with trio.fail_after(SECONDS):
        async with (
            memory_cluster(model, min_nodes=2, node_host="0.0.0.0") as cluster,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(run_on, cluster, "near", "127.0.0.1", "0.0.0.0")
            await cluster.until(lambda status: len(status.nodes) == 1)
            nursery.start_soon(run_on, cluster, "friend", "192.168.1.7", None)
            status = await cluster.ready()
            assert [(node.node_id, node.link) for node in status.nodes] == [("near", ""), ("friend", "direct")]
            sent = [msgpack.unpackb(frame) for frame in cluster.machine.sent]
            [order] = [message["payload"] for message in sent if message["type"] == "CONNECT_PEER"]
            assert order["hosts"] == ["192.168.1.7"]
            nursery.cancel_scope.cancel()


async def run_on(cluster: MemoryCluster, node_id: str, host: str, peer_host: str | None) -> None:
    settings = NodeSettings(
        node_id,
        cluster_host=host,
        cluster_port=cluster.coordinator.node_port,
        device="cpu",
        threads=1,
        transport=Machine.name,
        peer_host=peer_host,
    )
    await run_node(settings, plugins_on(Machine(cluster.network)), Activity())
