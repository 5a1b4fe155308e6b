"""`core plan`: what a cluster would do with a model, without loading any weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from core.cli.console import WireDType, set_up_logging, show_bytes
from core.errors import ConfigError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType

_SIZE = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>gb|mb)", re.IGNORECASE)


def plan(
    model: Annotated[str, typer.Option(help="A Hugging Face repo id, a model directory, or a .gguf file.")],
    node: Annotated[list[str], typer.Option(help="A node's memory: 8gb, 500mb or name=24gb; once per node.")],
    revision: Annotated[str | None, typer.Option(help="The repo's branch, tag or commit.")] = None,
    min_nodes: Annotated[int, typer.Option(help="Use at least so many nodes.", min=1)] = 1,
    max_nodes: Annotated[int | None, typer.Option(help="Use at most so many nodes.", min=1)] = None,
    quant: Annotated[str, typer.Option(help="How weights are packed (see `core plugins`).")] = "fp16",
    keep_head: Annotated[
        bool, typer.Option("--keep-head", help="Leave embedding and head as they are, whatever --quant.")
    ] = False,
    dtype: Annotated[
        DType | None, typer.Option(help="What layers compute in. Default: fp16, but bf16 for int8 and int4.")
    ] = None,
    wire_dtype: Annotated[WireDType, typer.Option(help="What hidden states travel in.")] = WireDType.AUTO,
    planner: Annotated[str, typer.Option(help="How layers are divided among nodes.")] = "balanced",
    hf_cache_dir: Annotated[Path | None, typer.Option(help="Where downloaded models are kept.")] = None,
) -> None:
    """Show which node would hold which layers of a model, and what would be missing."""
    set_up_logging("warning")
    from core.coordinator.planning import node_memory, plan_request
    from core.interfaces.planner import Candidate
    from core.plugins import PluginHost
    from core.runtime.model import Model, Precision, choose_wire

    plugins = PluginHost.installed()
    quantizer, chosen = plugins.quantizers.get(quant), plugins.planners.get(planner)
    candidates = tuple(
        Candidate(name, node_memory(memory, capped=False), "unknown")
        for name, memory in (parse_node(text, index) for index, text in enumerate(node, start=1))
    )
    with Model.open(Source(model, revision, hf_cache_dir), plugins) as opened:
        compute = dtype or quantizer.compute
        precision = Precision(quantizer, compute, choose_wire(wire_dtype, compute, opened.checkpoint), keep_head)
        request = plan_request(opened, precision, candidates, min_nodes, max_nodes)
        result = chosen.plan(request)
        hidden = opened.spec.hidden_size * precision.wire.itemsize
        typer.echo(f"{model}: {opened.spec.layers} layers, {opened.architecture.name}, {quant}, {compute}")
        typer.echo(f"  coordinator  embedding, norm and head  {show_bytes(opened.ends_bytes(precision))}")
    for stage in result.stages:
        typer.echo(
            f"  {stage.node_id}  layers [{stage.start}, {stage.end})  {show_bytes(stage.nbytes)} with its KV cache"
        )
    for node_id, reason in result.left_out:
        typer.echo(f"  {node_id}  without layers; {reason}")
    hops = len(result.stages) + 1
    typer.echo(f"each decoded token crosses {hops} links with {hidden} bytes of hidden state ({precision.wire})")


def parse_node(text: str, index: int) -> tuple[str, int]:
    """`8gb` or `name=8gb` -> (name, bytes). Raises ConfigError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--node {text!r} is no size", "", "write it as 8gb, 500mb or name=24gb")
    unit = 10**9 if match["unit"].lower() == "gb" else 10**6
    return match["name"] or f"node-{index}", int(float(match["number"]) * unit)
