"""core top: a running cluster in the terminal, as it is now and goes on."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import httpx
import trio
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from core.cli.api_options import own_headers
from core.cli.console import run, show_bytes
from core.cli.options import ApiUrl
from core.errors import ConfigError, CoreError

REFRESH_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0


def top(
    url: ApiUrl = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
) -> None:
    """Show a running cluster, live. The API key, if it needs one, is taken from CORE_API_KEY."""
    run(partial(_watch, url.rstrip("/"), once))


async def _watch(url: str, once: bool) -> None:
    async with httpx.AsyncClient(base_url=url, headers=own_headers(), timeout=TIMEOUT_SECONDS) as client:
        first = view(await _status(client))
        if once:
            Console().print(first)
            return
        with Live(first, screen=True, auto_refresh=False) as live:
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
    try:
        answer = await client.get("/v1/cluster")
    except httpx.HTTPError as error:
        raise CoreError(
            f"no answer from {client.base_url}", str(error) or type(error).__name__, "is `core serve` running there?"
        ) from error
    if answer.status_code == 401:
        raise ConfigError("the API key is missing or wrong", "", "set CORE_API_KEY to one that the cluster takes")
    try:
        status: dict[str, Any] = answer.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError) as error:
        raise CoreError(f"{client.base_url} is no cluster", str(error)) from error
    return status


def view(status: dict[str, Any]) -> Group:
    """What `/v1/cluster` says, for people."""
    kv = status["kv"]
    used = kv["reserved"] + kv["kept"]
    lines = [
        f"{status['model']}  {status['state']}" + (f": {status['detail']}" if status["detail"] else ""),
        f"{status['tokens_per_second']:.1f} tokens/s   {status['sessions']} generations   route {status['route_epoch']}"
        f"   between hops {status['wire_ms']:.1f} ms",
        f"KV cache: {used:,} of {kv['tokens']:,} tokens ({kv['kept']:,} kept of ended generations)",
    ]
    return Group(*lines, "", _nodes(status), "", _generations(status["generations"]))


def _nodes(status: dict[str, Any]) -> Table:
    table = _table("node", "state", "layers", "device", "weights", "KV cache", "free", "computes", "waits", "link")
    hops = {hop["node_id"]: hop for hop in status["hops"]}
    for node in status["nodes"]:
        start, end = node["layers"] or (0, 0)
        hop = hops.get(node["node_id"])
        table.add_row(
            node["node_id"],
            " ".join(filter(None, (node["state"], node["detail"]))),
            f"[{start}, {end})" if end else "-",
            node["device"],
            show_bytes(node["weight_bytes"]),
            show_bytes(node["kv_bytes"]),
            show_bytes(node["free_memory"]),
            f"{hop['compute_ms']:.1f} ms" if hop else "-",
            f"{hop['queue_ms']:.1f} ms" if hop else "-",
            node["link"] or "-",
        )
    return table


def _generations(generations: list[dict[str, Any]]) -> Table:
    table = _table("generation", "phase", "prompt", "prefilled", "cached", "tokens", "tokens/s", "guessed right", "age")
    for each in generations:
        guessed = f"{each['accepted']} of {each['drafted']}" if each["drafted"] else "-"
        table.add_row(
            str(each["session"]),
            each["phase"],
            str(each["prompt_tokens"]),
            str(each["prefilled"]),
            str(each["cached_tokens"]),
            str(each["tokens"]),
            f"{each['tokens_per_second']:.1f}",
            guessed,
            f"{each['seconds']:.0f} s",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table
