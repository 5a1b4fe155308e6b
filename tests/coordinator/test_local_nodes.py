"""Nodes on the coordinator's own machine: what memory they have, and where they are told to connect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from core.coordinator import local_nodes
from core.coordinator.planning import USABLE
from core.interfaces.planner import Plan, PlanRequest
from core.plugins import PluginHost
from core.testing.cluster_in_memory import memory_cluster

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
    model: Path, tmp_path: Path, commands: list[Sequence[str]], node_host: str, dialled: str, peer_host: str | None
) -> None:
    beside = {"min_nodes": 1, "local_nodes": 1, "state_dir": tmp_path / "state"}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, node_host=node_host, **beside) as cluster:
            await cluster.until(lambda _: bool(commands))
    [command] = commands
    assert option(command, "--cluster-host") == dialled
    assert option(command, "--peer-host") == peer_host


@pytest.mark.parametrize("compiles", [True, False])
async def test_local_nodes_compile_their_layers_where_that_was_asked_for(
    model: Path, commands: list[Sequence[str]], compiles: bool
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, local_nodes=1, compiles=compiles) as cluster:
            await cluster.until(lambda _: bool(commands))
    assert ("--compile" in commands[0]) is compiles


async def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    tried: list[Sequence[str]] = []

    async def fail(command: Sequence[str]) -> int:
        tried.append(command)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(local_nodes, "_run_to_its_end", fail)
    with trio.move_on_after(2 * local_nodes.FIRST_WAIT_SECONDS):
        await local_nodes.run_local_nodes(["local-1"], [])
    assert len(tried) == 2
    assert "local-1 can't be started: [Errno 11] Resource temporarily unavailable" in caplog.text
