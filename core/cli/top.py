"""core top: a running cluster in the terminal, as it is now and goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import httpx
import trio
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from core.cli.api_client import api_client, ask
from core.cli.console import counted, describe_precision, output, run, show_bytes, table
from core.cli.options import ApiUrl
from core.errors import ConfigError, CoreError

REFRESH_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0


def top(
    url: ApiUrl = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
) -> None:
    """Show a running cluster, live. The API key, if it needs one, is taken from CORE_API_KEY."""
    if not once and not sys.stdout.isatty():
        raise ConfigError("core top needs a terminal", "its output goes elsewhere", "core top --once ends by itself")
    run(partial(_watch, api_client(url, TIMEOUT_SECONDS), once))


async def _watch(client: httpx.AsyncClient, once: bool) -> None:
    async with client:
        first = view(await _status(client))
        if once:
            output().print(first)
            return
        with Live(first, console=output(), screen=True, auto_refresh=False) as live:
            while True:
                await trio.sleep(REFRESH_SECONDS)
                live.update(await _view_now(client), refresh=True)


async def _view_now(client: httpx.AsyncClient) -> Group | Text:
    """A coordinator that goes away may come back: it is shown as missing."""
    try:
        return view(await _status(client))
    except CoreError as error:
        return Text(str(error))


async def _status(client: httpx.AsyncClient) -> dict[str, Any]:
    return await ask(client, "GET", "/v1/cluster", "nodes")


def view(status: dict[str, Any]) -> Group:
    """What `/v1/cluster` says, for people."""
    kv, nodes, hops = status["kv"], status["nodes"], {hop["node_id"]: hop for hop in status["hops"]}
    used = kv["reserved"] + kv["kept"]
    speed = [f"{status['tokens_per_second']:.1f} tokens/s", counted(status["sessions"], "generation")]
    if hops:
        speed.append(f"between hops {status['wire_ms']:.1f} ms")
    parts: list[RenderableType] = [
        f"{status['model']}  {status['state']}" + (f": {status['detail']}" if status["detail"] else ""),
        "   ".join([*speed, f"route {status['route_epoch']}"]),
        describe_precision(*(status[name] for name in ("quant", "dtype", "wire_dtype", "quality"))),
        f"KV cache: {used:,} of {kv['tokens']:,} tokens ({kv['kept']:,} kept of ended generations)",
    ]
    if taken := status["measured_token_seconds"]:
        predicted = status["predicted_token_seconds"]
        parts.append(f"a token takes {1000 * taken:.1f} ms" + (f", {1000 * predicted:.1f} predicted" * (predicted > 0)))
    if nodes:
        parts += ["", _nodes(nodes), *_details(nodes)]
    if any(node["layers"] for node in nodes):
        parts += ["", _shares(nodes, hops)]
    if status["generations"]:
        parts += ["", _generations(status["generations"]), *_recoveries(status["generations"])]
    return Group(*parts)


def _nodes(nodes: list[dict[str, Any]]) -> Table:
    shown = table("node", "state", "layers", "device", "free", "link", right=["free"])
    for node in nodes:
        start, end = node["layers"] or (0, 0)
        done, total = node["progress"] or (0, 0)
        shown.add_row(
            node["node_id"],
            f"{node['state']} {done / total:.0%}" if total else node["state"],
            f"[{start}, {end})" if end else "-",
            node["device"],
            show_bytes(node["free_memory"]),
            node["link"].partition(" ")[0] or "-",
        )
    return shown


def _details(nodes: list[dict[str, Any]]) -> Iterator[str]:
    """What is too long for a table: why a node holds no layers, or is not reached directly."""
    for node in nodes:
        for detail in (node["detail"], node["link"]):
            if " " in detail:
                yield f"{node['node_id']}: {detail}"


def _shares(nodes: list[dict[str, Any]], hops: dict[str, dict[str, Any]]) -> Table:
    """What each node does with its layers; the times are those of a decode step."""
    numbers = ("weights", "KV cache", "computes", "waits")
    shown = table("node", *numbers, right=numbers)
    for node in nodes:
        if node["layers"]:
            hop = hops.get(node["node_id"])
            times = [f"{hop[kind]:.1f} ms" if hop else "-" for kind in ("compute_ms", "queue_ms")]
            shown.add_row(node["node_id"], show_bytes(node["weight_bytes"]), show_bytes(node["kv_bytes"]), *times)
    return shown


def _generations(generations: list[dict[str, Any]]) -> Table:
    numbers = ("prompt", "prefilled", "cached", "tokens", "tokens/s", "guessed", "right", "age")
    shown = table("id", "phase", *numbers, right=numbers)
    for each in generations:
        counts = ("prompt_tokens", "prefilled", "cached_tokens", "tokens")
        shown.add_row(
            str(each["session"]),
            each["phase"],
            *(str(each[count]) for count in counts),
            f"{each['tokens_per_second']:.1f}",
            str(each["drafted"]),
            str(each["accepted"]),
            f"{each['seconds']:.0f} s",
        )
    return shown


def _recoveries(generations: list[dict[str, Any]]) -> Iterator[str]:
    """Why a generation is suspended or failed, and how often one went on after its route had broken."""
    for each in generations:
        if each["detail"]:
            yield f"{each['session']}: {each['detail']}"
        if each["recoveries"]:
            yield f"{each['session']}: recovered from {counted(each['recoveries'], 'lost route')}"
