"""Nodes on the coordinator's own machine: how they are known, what memory they have, where they are to connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

SECONDS = 300
TOKENS = 24
FREE = 2**30


@dataclass(frozen=True)
class Started:
    """How the coordinator would have started its nodes."""

    node_ids: Sequence[str]
    options: Sequence[str]
    token: bytes

    def option(self, name: str) -> str | None:
        return self.options[self.options.index(name) + 1] if name in self.options else None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What local nodes would be started with; none is."""
    noted: list[Started] = []

    async def note(node_ids: Sequence[str], options: Sequence[str], token: bytes) -> None:
        noted.append(Started(node_ids, options, token))

    monkeypatch.setattr("core.coordinator.node_port.run_local_nodes", note)
    return noted


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """What the planner is asked, where this machine has `FREE` bytes free."""
    noted: list[PlanRequest] = []
    planner = type(PluginHost.installed().planners.get("measured"))
    plan = planner.plan

    def note(self: Any, request: PlanRequest) -> Plan:
        noted.append(request)
        return plan(self, request)

    monkeypatch.setattr(planner, "plan", note)
    monkeypatch.setattr("core.coordinator.live.free_memory", lambda _: FREE)
    return noted


def memory_of(request: PlanRequest) -> dict[str, int]:
    return {node.node_id: node.memory for node in request.candidates}


async def test_local_nodes_share_what_was_free_before_anything_was_loaded(
    model: Path, started: list[Started], asked: list[PlanRequest], inside: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=3, local_nodes=2) as cluster:
            await cluster.until(lambda _: bool(started))
            [nodes] = started
            assert nodes.node_ids == ["local-1", "local-2"]
            for node_id in nodes.node_ids:
                await cluster.start_node(node_id, max_memory=None, local_token=nodes.token)
            await cluster.start_node("friend", max_memory=FREE)
            await cluster.ready()
            generator = inside(cluster).generator
            share = int((FREE - generator.model.embed_and_head_bytes(generator.precision)) / 2 * USABLE)
    assert memory_of(asked[0]) == {"local-1": share, "local-2": share, "friend": FREE}


@pytest.mark.parametrize("token", [None, bytes(32)], ids=["no token", "another token"])
@pytest.mark.parametrize("local_nodes", [0, 1])
async def test_a_node_that_calls_itself_local_is_a_node_like_any_other(
    model: Path,
    prompt: tuple[int, ...],
    oracle: str,
    started: list[Started],
    asked: list[PlanRequest],
    local_nodes: int,
    token: bytes | None,
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, local_nodes=local_nodes) as cluster:
            await cluster.start_node("local-pc", max_memory=FREE // 2, local_token=token)
            await cluster.ready()
            assert await cluster.text(prompt, TOKENS) == oracle
    assert memory_of(asked[0]) == {"local-pc": FREE // 2}


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
    model: Path, tmp_path: Path, started: list[Started], node_host: str, dialled: str, peer_host: str | None
) -> None:
    beside = {"min_nodes": 1, "local_nodes": 1, "state_dir": tmp_path / "state"}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, node_host=node_host, **beside) as cluster:
            await cluster.until(lambda _: bool(started))
    [nodes] = started
    assert nodes.option("--cluster-host") == dialled
    assert nodes.option("--peer-host") == peer_host
    assert nodes.token.hex() not in nodes.options, "other users of this machine see a process's options"


@pytest.mark.parametrize("compiles", [True, False])
async def test_local_nodes_compile_their_layers_where_that_was_asked_for(
    model: Path, started: list[Started], compiles: bool
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, local_nodes=1, compiles=compiles) as cluster:
            await cluster.until(lambda _: bool(started))
    assert ("--compile" in started[0].options) is compiles


async def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    tried: list[str] = []

    async def fail(_: Sequence[str], environment: Mapping[str, str]) -> int:
        tried.append(environment[local_nodes.LOCAL_TOKEN])
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(local_nodes, "_run_to_its_end", fail)
    with trio.move_on_after(2 * local_nodes.FIRST_WAIT_SECONDS):
        await local_nodes.run_local_nodes(["local-1"], [], b"its token")
    assert tried == [b"its token".hex()] * 2
    assert "local-1 can't be started: [Errno 11] Resource temporarily unavailable" in caplog.text
