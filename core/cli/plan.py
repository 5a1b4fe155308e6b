"""`core plan`: what a cluster would do with a model, without loading any weights."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated

import typer

from core.cli.console import WireDType, aligned, counted, set_up_logging, show_bytes
from core.cli.options import CacheDir, Compute, KeepHead, ModelName, PlannerName, Quant, Revision, Wire, bounds
from core.errors import ConfigError
from core.interfaces.checkpoint import Source

_SIZE = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>gb|mb)", re.IGNORECASE)


def plan(
    model: ModelName,
    node: Annotated[
        list[str],
        typer.Option(
            metavar="SIZE", help="A node's memory: 8gb, 500mb or name=24gb; once per node. A tenth stays free."
        ),
    ],
    revision: Revision = None,
    min_nodes: Annotated[int, typer.Option(help="Use at least so many nodes.", min=1)] = 1,
    max_nodes: Annotated[int | None, typer.Option(help="Use at most so many nodes.", min=1)] = None,
    quant: Quant = "fp16",
    keep_head: KeepHead = False,
    dtype: Compute = None,
    wire_dtype: Wire = WireDType.AUTO,
    planner: PlannerName = "balanced",
    hf_cache_dir: CacheDir = None,
) -> None:
    """Show which node would hold which layers of a model. No weights are loaded."""
    set_up_logging("warning")
    from core.coordinator.planning import node_memory, plan_request, planned
    from core.interfaces.planner import Candidate
    from core.plugins import PluginHost
    from core.runtime.model import Model, Precision, choose_wire

    bounds(min_nodes, max_nodes)
    nodes = [parse_node(text, index) for index, text in enumerate(node, start=1)]
    for name, count in Counter(name for name, _ in nodes).items():
        if count > 1:
            raise ConfigError(f"{count} nodes are called {name!r}", "", "give each --node a name of its own, or none")
    plugins = PluginHost.installed()
    quantizer, chosen = plugins.quantizers.get(quant), plugins.planners.get(planner)
    candidates = tuple(Candidate(name, node_memory(memory), "unknown") for name, memory in nodes)
    with Model.open(Source(model, revision, hf_cache_dir), plugins) as opened:
        compute = dtype or quantizer.compute
        precision = Precision(quantizer, compute, choose_wire(wire_dtype, compute, opened.checkpoint), keep_head)
        request = plan_request(opened, precision, candidates, min_nodes, max_nodes)
        result = planned(chosen, request)
        hidden = opened.spec.hidden_size * precision.wire.itemsize
        typer.echo(f"plan for {model}")
        typer.echo(
            f"{counted(opened.spec.layers, 'layer')}, architecture {opened.architecture.name},"
            f" quant {quant}, dtype {compute}, wire dtype {precision.wire}"
        )
        rows = [("coordinator", "embedding, norm, head", show_bytes(opened.embed_and_head_bytes(precision)))]
    rows += [
        (stage.node_id, f"layers [{stage.start}, {stage.end})", f"{show_bytes(stage.nbytes)} with its KV cache")
        for stage in result.stages
    ]
    rows += [(node_id, "no layers", reason) for node_id, reason in result.left_out]
    typer.echo(aligned(*rows, indent=2))
    typer.echo(f"each decoded token crosses {len(result.stages) + 1} links with {hidden} bytes of hidden state")


def parse_node(text: str, index: int) -> tuple[str, int]:
    """`8gb` or `name=8gb` -> (name, bytes). Raises ConfigError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--node {text!r} is no size", "", "write it as 8gb, 500mb or name=24gb")
    unit = 10**9 if match["unit"].lower() == "gb" else 10**6
    return match["name"] or f"node-{index}", int(float(match["number"]) * unit)
