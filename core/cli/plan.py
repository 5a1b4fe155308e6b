"""`core plan`: what a cluster would do with a model, without loading any weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from core.cli.console import DTypeOption, counted, describe_precision, run, set_up_logging, show_bytes
from core.cli.options import KV, CacheDir, Compute, KeepHead, Quant, Revision, Wire, bounds
from core.cli.plan_options import (
    DEFAULT_PLANNER,
    Excluded,
    MaxContext,
    Pins,
    PlanForName,
    PlannedContext,
    PlannerName,
    links_of_machine,
    parse_link,
    parse_node,
    parse_pins,
    parse_size,
    refuse_equal_names,
    refuse_longer_context,
    refuse_unknown_names,
)
from core.cli.what_if import described, what_if
from core.errors import ConfigError, PlanError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import KVDType
from core.interfaces.planner import PlanFor


def plan(
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face repo id, a model directory, or a .gguf file.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="A node: its memory, of which a tenth stays free, as 8gb or name=24gb; and how long a token takes"
            " through the whole model on it, as name=24gb,9ms. Once per node.",
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK",
            help="What `ping` says between two nodes, and the bandwidth: mac:pc=3ms or mac:pc=3ms,1gbit;"
            " mac=3ms is between mac and the coordinator. Once per link.",
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The coordinator's memory, for embedding and head: 16gb. Or the name of the node on whose machine it"
            " runs: it takes what it needs from that one's memory.",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="URL", help="Plan for the nodes of a running cluster, whose API is there.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="With --cluster: what if this node went away?")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="SIZE", help="With --cluster: what if such a node came? As for --node."),
    ] = None,
    plan_for: PlanForName = PlanFor.LATENCY,
    pin: Pins = None,
    exclude: Excluded = None,
    context: PlannedContext = None,
    max_context: MaxContext = None,
    revision: Revision = None,
    min_nodes: Annotated[int, typer.Option(help="Use at least so many nodes.", min=1)] = 1,
    max_nodes: Annotated[int | None, typer.Option(help="Use at most so many nodes.", min=1)] = None,
    quant: Quant = "auto",
    keep_head: KeepHead = False,
    dtype: Compute = DTypeOption.AUTO,
    wire_dtype: Wire = DTypeOption.AUTO,
    kv_dtype: KV = KVDType.AUTO,
    planner: PlannerName = DEFAULT_PLANNER,
    hf_cache_dir: CacheDir = None,
) -> None:
    """Show which node would hold which layers of a model, and why. No weights are loaded."""
    set_up_logging("warning")
    if cluster is not None:
        if model or node or link or coordinator or pin or exclude or context or max_context:
            raise ConfigError("--cluster brings its own model and nodes", "", "leave out all but --without and --with")
        run(partial(what_if, cluster, without or [], with_ or []))
        return
    if without or with_:
        raise ConfigError("--without and --with ask about a running cluster", "", "add --cluster URL")
    if model is None or not node:
        raise ConfigError("--model and --node are missing", "", "or give --cluster URL")
    bounds(min_nodes, max_nodes)
    refuse_longer_context(context, max_context)
    nodes = [parse_node(text, f"node-{index}") for index, text in enumerate(node, start=1)]
    refuse_equal_names(each.name for each in nodes)
    excluded, links, pins = exclude or [], dict(map(parse_link, link or [])), parse_pins(pin or [])
    used = [each for each in nodes if each.name not in excluded]
    refuse_unknown_names([*excluded, *pins, *(end for ends in links for end in ends)], [each.name for each in nodes])
    host = next((each for each in nodes if each.name == coordinator), None)
    host_memory = host.memory if host else parse_size(coordinator, "--coordinator") if coordinator else None
    if host:
        links = {**links_of_machine(host.name, links), **links}

    from core.coordinator.planning import node_memory, plan_request, planned, planned_context
    from core.plugins import PluginHost
    from core.runtime.device import pick
    from core.runtime.model import Model
    from core.runtime.precision_choice import choose_precision, refuse_unknown

    plugins = PluginHost.installed()
    refuse_unknown(quant, plugins.quantizers)
    chosen = plugins.planners.get(planner)
    with Model.open(Source(model, revision, hf_cache_dir), plugins) as opened:
        precision = choose_precision(
            opened,
            plugins.quantizers,
            pick("auto"),
            quant=quant,
            dtype=dtype.dtype,
            wire=wire_dtype,
            keep_head=keep_head,
            kv=kv_dtype,
        )
        own = opened.embed_and_head_bytes(precision)
        if host_memory is not None and own > (usable := node_memory(host_memory)):
            raise PlanError(
                "the coordinator is too small",
                f"embedding and head take {show_bytes(own)}, and {show_bytes(usable)} of its memory may be filled",
                "give it to a larger machine, or choose a smaller model or a stronger quantization",
                missing_bytes=own - usable,
            )
        used = [each.with_head(own) if each is host else each for each in used]
        room = planned_context(context, max_context)
        request = plan_request(opened, precision, (), min_nodes, max_nodes, room)
        request = replace(
            request,
            candidates=tuple(each.as_candidate(request.weight_bytes) for each in used),
            plan_for=plan_for,
            wires=links,
            pins=pins,
        )
        result = planned(chosen, request)
        typer.echo(f"plan for {model}")
        names = (precision.quantizer.name, precision.compute, precision.wire)
        typer.echo(
            f"{counted(opened.spec.layers, 'layer')}, architecture {opened.architecture.name},"
            f" {describe_precision(*names, precision.quality)}"
        )
    result = replace(result, left_out=(*result.left_out, *((name, "left out by --exclude") for name in excluded)))
    typer.echo(described(result, ("coordinator", "first and last part (embedding, head)", show_bytes(own))))
