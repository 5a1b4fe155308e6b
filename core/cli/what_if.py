"""`core plan --cluster`: the plan for a running cluster's nodes, and what would become of it with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from core.cli.api_client import api_client, ask
from core.cli.console import aligned, counted, show_bytes
from core.cli.plan_options import parse_node, refuse_equal_names, refuse_unknown_names
from core.errors import CoreError
from core.interfaces.planner import Candidate, Plan, PlanFor, PlanRequest, Wire

TIMEOUT_SECONDS = 30.0
_ABSENT = ("paused", "failed")


def described(plan: Plan, *first: tuple[str, str, str]) -> str:
    """The plan in lines, behind these rows: who has which layers, who has none and why, and what there is to say."""
    layers = plan.stages[-1].end
    rows = [
        *first,
        *(
            (
                stage.node_id,
                f"layers [{stage.start}, {stage.end}), {stage.end - stage.start} of {layers}",
                f"{show_bytes(stage.nbytes)} with room for texts (its KV cache)",
            )
            for stage in plan.stages
        ),
        *((node_id, "no layers", reason) for node_id, reason in plan.left_out),
    ]
    return "\n".join((aligned(*rows, indent=2), *plan.notes))


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """What a cluster's API says of it: what its planner is asked for, and which one that is."""

    model: str
    planner: str
    request: PlanRequest


async def what_if(url: str, without: list[str], with_: list[str]) -> None:
    """Prints the plan for the nodes that are there; and the one for those that would be, with what it brings."""
    from core.coordinator.planning import planned
    from core.coordinator.what_if import difference, tried
    from core.plugins import PluginHost

    async with api_client(url, TIMEOUT_SECONDS) as client:
        cluster = read_cluster(await ask(client, "GET", "/v1/cluster", "nodes"), url)
    planner = PluginHost.installed().planners.get(cluster.planner)
    typer.echo(f"plan for {cluster.model}: {counted(len(cluster.request.layer_bytes), 'layer')}")
    if not (without or with_):
        typer.echo(described(planned(planner, cluster.request)))
        return
    changed = with_newcomers(cluster.request, without, with_)
    now = tried(planner, cluster.request)
    then = planned(planner, changed)
    typer.echo(described(then))
    typer.echo(difference(now, cluster.request, then, changed))
    if newcomers := _without_speed(then, changed, cluster.request):
        typer.echo(f"Say how long a token takes through the whole model on {newcomers}: --with 24gb,9ms")


def _without_speed(plan: Plan, changed: PlanRequest, request: PlanRequest) -> str:
    """The newcomers that have layers, though nobody said how fast they are."""
    there, used = {node.node_id for node in request.candidates}, {stage.node_id for stage in plan.stages}
    untold = [node.node_id for node in changed.candidates if not node.row_seconds]
    return ", ".join(node_id for node_id in untold if node_id in used - there)


def read_cluster(status: dict[str, Any], url: str) -> RunningCluster:
    """What GET /v1/cluster answered. Raises CoreError if it does not say what plans are made of."""
    asked = status.get("planning")
    if not asked:
        raise CoreError(f"the cluster at {url} makes no plans yet", str(status.get("detail", "")), "ask it again later")
    nodes = [
        Candidate(
            node["node_id"],
            node.get("memory", 0),
            node["device"],
            row_seconds=tuple(node.get("row_seconds") or ()),
            chunk_seconds=tuple(node.get("chunk_seconds") or ()),
            held=frozenset(range(*node["layers"])) if node["layers"] else frozenset(),
            labels=frozenset(node.get("labels") or ()),
            estimated=node.get("estimated", False),
        )
        for node in status["nodes"]
        if node["state"] not in _ABSENT and node["node_id"] not in asked.get("excluded", ())
    ]
    return RunningCluster(
        status["model"],
        asked["planner"],
        PlanRequest(
            layer_bytes=tuple(asked["layer_bytes"]),
            candidates=tuple(nodes),
            min_stages=asked["min_nodes"],
            max_stages=asked["max_nodes"],
            weight_bytes=tuple(asked["weight_bytes"]),
            plan_for=PlanFor(asked["plan_for"]),
            row_bytes=asked["row_bytes"],
            wires={tuple(wire["ends"]): Wire(wire["seconds"], wire["bandwidth"]) for wire in status.get("wires", ())},
            pins={node_id: range(*layers) for node_id, layers in asked.get("pins", {}).items()},
            prompt_rows=asked.get("prompt_rows", 0.0),
            head_seconds=asked.get("head_seconds", 0.0),
        ),
    )


def with_newcomers(request: PlanRequest, without: list[str], with_: list[str]) -> PlanRequest:
    """For the cluster without some of its nodes, and with others. Raises ConfigError for names that can't be."""
    from core.coordinator.what_if import changed_request

    there = [node.node_id for node in request.candidates]
    refuse_unknown_names(without, there)
    newcomers = [parse_node(text, f"new-{index}", "--with") for index, text in enumerate(with_, start=1)]
    staying = [node_id for node_id in there if node_id not in without]
    refuse_equal_names([*staying, *(node.name for node in newcomers)])
    return changed_request(request, without, [node.as_candidate(request.weight_bytes) for node in newcomers])
