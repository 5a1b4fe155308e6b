"""`core rebalance`: has a running cluster make its plan again."""

from __future__ import annotations

from functools import partial

import httpx
import typer

from core.cli.api_client import api_client, ask
from core.cli.console import run
from core.cli.options import ApiUrl

TIMEOUT_SECONDS = 60.0


def rebalance(url: ApiUrl = "http://127.0.0.1:8000") -> None:
    """Have a running cluster make its plan again, of all nodes there. The API key is taken from CORE_API_KEY."""
    run(partial(_ask, api_client(url, TIMEOUT_SECONDS)))


async def _ask(client: httpx.AsyncClient) -> None:
    async with client:
        told = await ask(client, "POST", "/v1/cluster/rebalance", "message")
    typer.echo(told["message"])
