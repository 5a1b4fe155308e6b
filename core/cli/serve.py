"""`core serve`: the coordinator with its HTTP API, and node processes of its own."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import trio
import typer

from core.cli.api_options import (
    KEEP_RESPONSES_MINUTES,
    AllowAnonymousApi,
    ApiKeyFile,
    CorsOrigins,
    KeepResponses,
    MaxTime,
    api_settings,
)
from core.cli.chat_options import ChatTemplate, ToolFormatOption, ToolsAsText, read_template
from core.cli.console import (
    Bars,
    DTypeOption,
    aligned,
    counted,
    describe_precision,
    gigabytes,
    run,
    set_up_logging,
    show_bytes,
)
from core.cli.options import (
    KV,
    CacheDir,
    Compute,
    KeepHead,
    LogLevel,
    ModelName,
    Quant,
    Revision,
    StateDirectory,
    Threads,
    TransportName,
    Wire,
    bounds,
)
from core.cli.plan_options import (
    DEFAULT_PLANNER,
    Excluded,
    MaxContext,
    Pins,
    PlanForName,
    PlannedContext,
    PlannerName,
    parse_caps,
    parse_pins,
    refuse_longer_context,
)
from core.coordinator.coordinator import Coordinator
from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError
from core.gateway.dialects.forms import ToolSettings
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import KVDType
from core.interfaces.engine import ClusterStatus
from core.interfaces.planner import PlanFor
from core.interfaces.transport import DEFAULT_TRANSPORT

_REFRESH_SECONDS = 0.2
"""Between two looks at how far a load is."""
_DAY_SECONDS = 86_400


class Rebalance(StrEnum):
    """The values of --rebalance."""

    AUTO = "auto"
    NEVER = "never"


def serve(
    model: ModelName,
    revision: Revision = None,
    node_host: Annotated[str, typer.Option(help="Where nodes join; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    node_port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 7001,
    api_host: Annotated[str, typer.Option(help="Where the HTTP API listens.")] = "127.0.0.1",
    api_port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8000,
    api_key_file: ApiKeyFile = None,
    allow_anonymous_api: AllowAnonymousApi = False,
    cors_origin: CorsOrigins = None,
    max_time: MaxTime = None,
    keep_responses: KeepResponses = KEEP_RESPONSES_MINUTES,
    local_nodes: Annotated[int, typer.Option(help="Node processes to start on this machine.", min=0, max=64)] = 1,
    min_nodes: Annotated[
        int | None, typer.Option(help="Use at least so many nodes. Default: the local ones, or 1.", min=1)
    ] = None,
    max_nodes: Annotated[int | None, typer.Option(help="Use at most so many nodes; others are spare.", min=1)] = None,
    quant: Quant = "auto",
    keep_head: KeepHead = False,
    dtype: Compute = DTypeOption.AUTO,
    wire_dtype: Wire = DTypeOption.AUTO,
    kv_dtype: KV = KVDType.AUTO,
    device: Annotated[str, typer.Option(help="The coordinator's own: auto, cuda, cuda:0, mps or cpu.")] = "auto",
    threads: Threads = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Local nodes compile their layers, as with `core node --compile`.")
    ] = False,
    target_node_memory_gb: Annotated[
        float | None, typer.Option(help="Plan with this for a node that can't tell its memory.", min=0.001, max=10**6)
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Its name in the API. Default: the repo id or file name.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Generations that run at once; others wait.", min=1)] = 64,
    max_context: MaxContext = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            help="Keep ended sessions' caches for the same client's prompts that begin alike, as memory allows."
        ),
    ] = True,
    share_prefix_cache: Annotated[
        bool, typer.Option(help="For every client's: `cached_tokens` then tells each what others asked before.")
    ] = False,
    speculation: Annotated[
        bool, typer.Option(help="Guess from the text itself where that saves steps; never changes an answer.")
    ] = True,
    recovery_time: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long an answer whose machine went away waits for others; 0 ends it at once.",
            min=0,
            max=_DAY_SECONDS,
        ),
    ] = 120,
    rebalance: Annotated[
        Rebalance, typer.Option(help="auto: a plan that is predicted to be better takes the serving one's place.")
    ] = Rebalance.AUTO,
    standby: Annotated[
        bool, typer.Option(help="Nodes without layers hold those in memory that the loss of another node would need.")
    ] = False,
    chat_template: ChatTemplate = None,
    tool_format: ToolFormatOption = None,
    tools_as_text: ToolsAsText = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run tokenizer code that the model's repo carries.")] = False,
    hf_cache_dir: CacheDir = None,
    transport: TransportName = DEFAULT_TRANSPORT,
    planner: PlannerName = DEFAULT_PLANNER,
    plan_for: PlanForName = PlanFor.LATENCY,
    pin: Pins = None,
    exclude: Excluded = None,
    context: PlannedContext = None,
    node_memory: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=SIZE", help="Plan with no more of a node's memory than this; once per node."),
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Where invites lead, instead of to this machine's addresses; once per host."),
    ] = None,
    announce: Annotated[
        bool, typer.Option(help="Be found on the local network by those who look for a cluster to join.")
    ] = True,
    state_dir: StateDirectory = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model with the machines that join. The API is OpenAI's: any client of that works."""
    from core.trust.addresses import is_loopback
    from core.trust.api_keys import ApiKeys
    from core.trust.link import refuse_no_host
    from core.trust.state_dir import StateDir

    set_up_logging(log_level)
    named_keys = ApiKeys(StateDir.open(state_dir))
    api = api_settings(api_key_file, allow_anonymous_api, cors_origin or [], max_time, keep_responses, named_keys)
    api = replace(api, tools=ToolSettings(tool_format, tools_as_text))
    least = min_nodes if min_nodes is not None else max(1, local_nodes)
    bounds(least, max_nodes)
    refuse_longer_context(context, max_context)
    if advertise and is_loopback(node_host):
        raise ConfigError("--advertise without friends", f"nodes join at {node_host} alone", "add --node-host 0.0.0.0")
    for host in advertise or ():
        refuse_no_host(host)
    if served_model_name == "":
        raise ConfigError("--served-model-name is empty", "", "give a name, or leave it out for the model's own")
    settings = CoordinatorSettings(
        source=Source(model, revision, hf_cache_dir, trust_remote_code),
        served_model_name=served_model_name or _name_of(model),
        node_host=node_host,
        node_port=node_port,
        min_nodes=least,
        max_nodes=max_nodes,
        local_nodes=local_nodes,
        quant=quant,
        keep_head=keep_head,
        dtype=dtype.dtype,
        wire_dtype=wire_dtype.value,
        kv_dtype=kv_dtype,
        device=device,
        threads=threads,
        compiles=compiles,
        target_node_memory=gigabytes(target_node_memory_gb),
        max_sessions=max_sessions,
        max_context=max_context,
        prefix_cache=prefix_cache,
        share_prefixes=share_prefix_cache,
        speculation=speculation,
        transport=transport,
        planner=planner,
        plan_for=plan_for,
        planned_context=context,
        pins=parse_pins(pin or []),
        excluded=frozenset(exclude or []),
        node_memory=parse_caps(node_memory or []),
        state_dir=state_dir,
        advertise=tuple(advertise or ()),
        announce=announce,
        recovery_time=recovery_time,
        rebalance=rebalance is Rebalance.AUTO,
        standby=standby,
        chat_template=None if chat_template is None else read_template(chat_template),
    )

    async def main() -> None:
        async with serving(settings, api_host, api_port, api, typer.echo) as server:
            typer.echo(f"nodes join  {node_host}:{server.coordinator.node_port}")
            if not is_loopback(node_host):
                typer.echo("friends     each joins with a link of its own, printed by: core invite")
            typer.echo(f"model       {settings.served_model_name}")
            if tools_as_text:
                typer.echo(
                    "tools       told as text, in the form of Hermes, if the chat template has no place for them"
                )
            while True:
                epoch = await show_progress(server.coordinator)
                await until_replaced(server.coordinator, epoch)

    run(main)


def _name_of(model: str) -> str:
    """A local file or directory is served under its own name, a repo under its id."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


@dataclass(frozen=True, slots=True)
class Server:
    coordinator: Coordinator
    url: str


@asynccontextmanager
async def serving(
    settings: CoordinatorSettings,
    api_host: str,
    api_port: int,
    api: ApiSettings,
    announce: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Server]:
    """A coordinator with its API, until the block ends. The API answers, and is announced, before anything is loaded.

    The block begins when nodes can join.
    """
    from core.gateway.server import serve_http

    coordinator = Coordinator(settings)
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(serve_http, coordinator, api_host, api_port, api)
        url = _url(host, port)
        announce(f"page        {_url(_for_others(host), port)}/")
        announce(f"API         {url}/v1")
        if not (api.had_keys or ip_address(host).is_loopback):
            announce(f"WARNING     the API needs no key: everyone who reaches {host} may use it")
        await nursery.start(coordinator.run)
        yield Server(coordinator, url)
        nursery.cancel_scope.cancel()


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _for_others(host: str) -> str:
    """Where a friend's browser finds what listens on the address `host`, which may stand for all of this machine's."""
    from core.trust.addresses import reachable

    return next(iter(reachable(host)), host) if ip_address(host).is_unspecified else host


async def show_progress(coordinator: Coordinator) -> int:
    """Says what happens, with a bar for whatever downloads or loads, until a route is ready: gives its epoch."""
    last = ""
    with Bars() as bars:
        while True:
            seen, status = coordinator.changes.count, coordinator.status()
            bars.show(_bars(status))
            said = f"{status.state}: {status.detail}" if status.detail else status.state
            if said != last:
                typer.echo(said)
                last = said
            if status.state == "ready":
                break
            with trio.move_on_after(_REFRESH_SECONDS if _is_loading(status) else math.inf):
                await coordinator.changes.wait(seen)
    typer.echo(describe_plan(status))
    return status.route_epoch


async def until_replaced(coordinator: Coordinator, epoch: int) -> None:
    """Until the route of that epoch is ready no more, or another one has taken its place."""
    while True:
        seen, status = coordinator.changes.count, coordinator.status()
        if (status.state, status.route_epoch) != ("ready", epoch):
            return
        await coordinator.changes.wait(seen)


def _is_loading(status: ClusterStatus) -> bool:
    return status.state == "loading" or status.progress is not None


def _bars(status: ClusterStatus) -> dict[str, tuple[int, int]]:
    bars = {f"{node.node_id} {node.detail}": node.progress for node in status.nodes if node.progress is not None}
    return bars | ({status.detail: status.progress} if status.progress is not None else {})


def describe_plan(status: ClusterStatus) -> str:
    """The plan in lines: who holds which layers, how much of it, how it is reached, and who is left out."""
    precision = describe_precision(status.quant, status.dtype, status.wire_dtype, status.quality)
    head = f"plan {status.route_epoch}: {counted(status.layers, 'layer')}, {precision}"
    rows = []
    for node in sorted((node for node in status.nodes if node.layers), key=lambda node: node.layers or (0, 0)):
        start, end = node.layers or (0, 0)
        link = f", link {node.link}" if node.link else ""
        held = f"{show_bytes(node.weight_bytes)} on {node.device}{link}"
        rows.append((node.node_id, f"layers [{start}, {end})", held))
    rows += [(node_id, "no layers", reason) for node_id, reason in status.left_out.items()]
    return "\n".join((head, aligned(*rows, indent=2), *status.notes))
