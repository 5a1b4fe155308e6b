"""`core plan`: machines, links and pins as people write them, plans as people read them, what-if for a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from core.cli import app
from core.cli.plan_options import (
    NodeOption,
    links_of_machine,
    parse_caps,
    parse_link,
    parse_node,
    parse_pins,
    parse_size,
)
from core.cli.what_if import read_cluster, with_newcomers
from core.errors import ConfigError, CoreError, PlanError, sole_error
from core.interfaces.planner import PlanFor, Wire
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import memory_cluster

LAYERS = 6
CLUSTER = {
    "model": "tiny",
    "detail": "",
    "nodes": [
        {
            "node_id": "mac",
            "device": "mps",
            "state": "ready",
            "memory": 80,
            "layers": [0, 4],
            "row_seconds": [0.02] * 6,
        },
        {
            "node_id": "pc",
            "device": "cuda",
            "state": "ready",
            "memory": 50,
            "layers": [4, 6],
            "row_seconds": [0.005] * 6,
        },
        {"node_id": "off", "device": "cpu", "state": "paused", "memory": 90, "layers": None, "row_seconds": []},
    ],
    "planning": {
        "planner": "measured",
        "plan_for": "latency",
        "layer_bytes": [10] * 6,
        "weight_bytes": [9] * 6,
        "row_bytes": 4096,
        "min_nodes": 1,
        "max_nodes": None,
        "pins": {"mac": [0, 1]},
        "excluded": [],
    },
    "wires": [
        {"ends": ["", "mac"], "seconds": 0.001, "bandwidth": 0},
        {"ends": ["", "pc"], "seconds": 0.001, "bandwidth": 0},
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("plan") / "model", layers=LAYERS)


def run(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done
    return [re.sub(r"  +", "  ", line.strip()) for line in done.output.splitlines()]


def refusal(*arguments: str) -> CoreError:
    error = sole_error(CliRunner().invoke(app, arguments).exception)  # type: ignore[arg-type]
    assert isinstance(error, CoreError)
    return error


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("8gb", NodeOption("node-1", 8 * 10**9)),
        ("mac=1.5TB", NodeOption("mac", 15 * 10**11)),
        ("my-pc.home=500 mb,9ms", NodeOption("my-pc.home", 500 * 10**6, 0.009)),
        ("24gb, 12.5 ms", NodeOption("node-1", 24 * 10**9, 0.0125)),
    ],
)
def test_a_node_is_its_memory_and_how_long_a_token_takes(text: str, node: NodeOption) -> None:
    assert parse_node(text, "node-1") == node


@pytest.mark.parametrize("text", ["8", "8kb", "=8gb", "mac=8gb,9", "mac=8gb,9s", "mac=-8gb", "8gb,9ms,3ms"])
def test_what_is_no_node_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_node(text, "node-1")


@pytest.mark.parametrize(
    ("text", "ends", "wire"),
    [
        ("mac:pc=3ms", ("mac", "pc"), Wire(0.0015)),
        ("mac:pc=3ms,1gbit", ("mac", "pc"), Wire(0.0015, 125e6)),
        ("mac=0.4ms,300Mbit", ("mac", ""), Wire(0.0002, 37.5e6)),
        ("coordinator:pc=1ms", ("", "pc"), Wire(0.0005)),
    ],
)
def test_a_link_is_what_ping_says(text: str, ends: tuple[str, str], wire: Wire) -> None:
    assert parse_link(text) == (ends, wire)


def test_links_pins_and_sizes_that_are_none_are_refused() -> None:
    for parse, text in (
        (parse_link, "mac:pc"),
        (parse_link, "mac:pc=1gbit"),
        (lambda text: parse_pins([text]), "mac=4"),
        (lambda text: parse_pins([text]), "mac=4-4"),
        (lambda text: parse_pins([text, text]), "mac=4-5"),
        (lambda text: parse_caps([text]), "16gb"),
        (lambda text: parse_size(text, "--coordinator"), "16"),
    ):
        with pytest.raises(ConfigError):
            parse(text)
    assert parse_pins(["a=0-10", "b=10-12"]) == {"a": range(10), "b": range(10, 12)}
    assert parse_caps(["a=16gb"]) == {"a": 16 * 10**9}


def test_the_plan_follows_what_is_told_of_machines_and_links(model: Path) -> None:
    told = run(
        "plan", "--model", str(model), "--node", "slow=60gb,220ms", "--node", "quick=8gb,17ms", "--link", "quick=1ms"
    )
    assert any(line.startswith("quick  layers [0, 6)") for line in told)
    assert any(line.startswith("slow  no layers  spare: with it, a token would take") for line in told)
    assert "One answer alone gets about 56 tokens a second, which are 42 words" in told[-1]


def test_the_coordinators_links_are_those_of_the_node_beside_it() -> None:
    near, far = Wire(0.001), Wire(0.02)
    links = {("a", "b"): near, ("b", "c"): far, ("a", "c"): near, ("", "b"): near}
    assert links_of_machine("b", links) == {("", "b"): Wire(0.0), ("", "a"): near, ("", "c"): far}


def test_pins_and_exclusions_are_kept(model: Path) -> None:
    nodes = ("--node", "a=8gb,1ms", "--node", "b=8gb,9ms", "--node", "c=8gb,9ms")
    told = run("plan", "--model", str(model), *nodes, "--pin", "b=1-3", "--exclude", "c")
    assert any(line.startswith(("b  layers [0, 3)", "b  layers [1, 6)")) for line in told)
    assert "c  no layers  left out by --exclude" in told


def test_many_answers_together_are_planned_otherwise_than_one(model: Path) -> None:
    nodes = ("--node", "a=8gb,30ms", "--node", "b=8gb,30ms")
    told = run("plan", "--model", str(model), *nodes, "--plan-for", "throughput")
    assert [line[:15] for line in told if "with room for texts" in line] == ["a  layers [0, 3", "b  layers [3, 6"]


def test_more_context_takes_more_memory(model: Path) -> None:
    def size(*context: str) -> float:
        [line] = [line for line in run("plan", "--model", str(model), "--node", "1tb", *context) if "[0, 6)" in line]
        return float(line.split("  ")[2].split()[0])

    assert size("--context", "64") == size("--max-context", "64") < size()
    assert "is more than --max-context 32" in str(
        refusal("plan", "--model", str(model), "--node", "1tb", "--context", "64", "--max-context", "32")
    )


def test_a_coordinator_that_is_too_small_is_told(model: Path) -> None:
    error = refusal("plan", "--model", str(model), "--node", "8gb", "--coordinator", "0.00001gb")
    assert isinstance(error, PlanError)
    assert "the coordinator is too small" in str(error)
    run("plan", "--model", str(model), "--node", "8gb", "--coordinator", "8gb")
    error = refusal("plan", "--model", str(model), "--node", "a=0.01mb", "--node", "b=8gb", "--coordinator", "a")
    assert isinstance(error, PlanError)


def test_the_coordinator_may_run_on_a_nodes_machine(model: Path) -> None:
    """It takes what it needs from that one's memory, and its link is that one's."""
    nodes = ("--node", "a=8gb,9ms", "--node", "b=8gb,9ms")
    told = run("plan", "--model", str(model), *nodes, "--link", "a:b=40ms", "--coordinator", "b")
    assert any(line.startswith("b  layers [0, 6)") for line in told)
    assert any("a  no layers  spare: with it, a token would take 40 ms longer" in line for line in told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--node", "a=8gb", "--link", "a:b=3ms"), "there is no node 'b'"),
        (("--node", "a=8gb", "--pin", "b=0-1"), "there is no node 'b'"),
        (("--node", "a=8gb", "--exclude", "b"), "there is no node 'b'"),
        (("--node", "a=8gb", "--without", "a"), "add --cluster URL"),
        (("--cluster", "http://127.0.0.1:1"), "brings its own model"),
        ((), "--model and --node are missing"),
    ],
)
def test_what_cant_be_asked_for_is_refused(arguments: Sequence[str], said: str) -> None:
    assert said in str(refusal("plan", "--model", "any", *arguments))


def answering(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any]) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=status))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
    monkeypatch.setattr("core.cli.what_if.api_client", lambda *_: client)


def test_a_running_cluster_says_what_would_be_without_a_machine_and_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, CLUSTER)
    told = run("plan", "--cluster", "http://127.0.0.1:8000")
    assert [line.partition("  ")[0] for line in told if "layers [" in line] == ["mac", "pc"]
    assert not any("off" in line for line in told), "it is paused"
    answering(monkeypatch, CLUSTER)
    told = run("plan", "--cluster", "http://127.0.0.1:8000", "--without", "pc")
    assert told[-1] == "A token would take 122 ms instead of 48 ms now."
    answering(monkeypatch, CLUSTER)
    told = run("plan", "--cluster", "http://127.0.0.1:8000", "--with", "new=24gb,12ms", "--without", "mac")
    assert any(line.startswith("new  layers [0, 6)") for line in told)
    assert "--with 24gb,9ms" not in told[-1]
    answering(monkeypatch, CLUSTER)
    told = run("plan", "--cluster", "http://127.0.0.1:8000", "--with", "24gb", "--without", "mac", "--without", "pc")
    assert told[-1] == "Say how long a token takes through the whole model on new-1: --with 24gb,9ms"
    answering(monkeypatch, {**CLUSTER, "planning": None})
    assert "makes no plans yet" in str(refusal("plan", "--cluster", "http://127.0.0.1:8000"))


def test_what_if_asks_for_nodes_that_are_there() -> None:
    request = read_cluster(CLUSTER, "url").request
    with pytest.raises(ConfigError, match="there is no node 'nas'"):
        with_newcomers(request, ["nas"], [])
    with pytest.raises(ConfigError, match="2 nodes are called 'pc'"):
        with_newcomers(request, [], ["pc=8gb"])
    assert with_newcomers(replace(request, min_stages=2), ["mac"], []).min_stages == 1


async def test_a_cluster_tells_what_its_plans_are_made_of(model: Path) -> None:
    options: dict[str, Any] = {"plan_for": PlanFor.THROUGHPUT, "planned_context": 16, "excluded": frozenset({"b"})}
    options |= {"pins": {"a": range(0, 3)}, "node_memory": {"a": 2**22}}
    async with memory_cluster(model, "b", "a", min_nodes=1, **options) as cluster:
        status = await cluster.ready()
    assert status.left_out["b"] == "`core serve --exclude` names it"
    found = read_cluster(asdict(status), "url")
    assert found.planner == "measured"
    assert [(node.node_id, node.memory) for node in found.request.candidates] == [("a", 2**22)]
    assert found.request.plan_for is PlanFor.THROUGHPUT
    assert found.request.pins == {"a": range(0, 3)}
    assert len(found.request.weight_bytes) == LAYERS
    assert found.request.head_seconds > 0
    reserved = {
        size - weight for size, weight in zip(found.request.layer_bytes, found.request.weight_bytes, strict=True)
    }
    assert len(reserved) == 1 and reserved.pop() > 0


async def test_a_cluster_waits_for_the_node_to_which_layers_are_pinned(model: Path) -> None:
    async with memory_cluster(model, "a", min_nodes=1, pins={"b": range(0, 3)}) as cluster:
        await cluster.until(lambda status: "layers are pinned to 'b'" in status.detail)
        await cluster.start_node("b")
        status = await cluster.ready()
    layers = {node.node_id: node.layers for node in status.nodes}
    assert layers["b"] is not None and layers["b"][0] == 0 and layers["b"][1] >= 3
