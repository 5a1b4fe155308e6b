"""`core node`: offers this machine's device to a coordinator."""

from __future__ import annotations

import logging
import os
import socket
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
import typer

from core.cli.console import Bars, gigabytes, run, set_up_logging
from core.cli.options import CacheDir, Device, LogLevel, Threads, TransportName


def node(
    cluster_host: Annotated[str, typer.Option(help="The coordinator's host.")] = "127.0.0.1",
    cluster_port: Annotated[int, typer.Option(help="The coordinator's node port.", min=1, max=65535)] = 7001,
    device: Device = "auto",
    node_id: Annotated[str, typer.Option(help="A stable name for this node. Default: host name and process.")] = "",
    hf_cache_dir: CacheDir = None,
    work_dir: Annotated[Path | None, typer.Option(help="Reserved for temporary files; nothing uses it yet.")] = None,
    max_memory_gb: Annotated[float | None, typer.Option(help="Offer at most this much memory.", min=0.001)] = None,
    threads: Threads = None,
    transport: TransportName = "trio-websocket",
    log_level: LogLevel = "info",
    peer_host: Annotated[str | None, typer.Option(hidden=True)] = None,
    end_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Join a cluster with this machine: load the layers that it assigns, and serve them."""
    set_up_logging(log_level)
    from core.node.agent import run_node
    from core.node.settings import NodeSettings
    from core.node.state import Activity
    from core.plugins import PluginHost

    settings = NodeSettings(
        node_id=node_id or f"{socket.gethostname()}-{os.getpid()}",
        cluster_host=cluster_host,
        cluster_port=cluster_port,
        device=device,
        hf_cache_dir=hf_cache_dir,
        work_dir=work_dir,
        max_memory=gigabytes(max_memory_gb),
        threads=threads,
        transport=transport,
        peer_host=peer_host,
    )
    if work_dir is not None:
        logging.getLogger(__name__).warning("--work-dir is reserved: nothing is written there yet")
    plugins = PluginHost.installed()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if end_with_stdin:
                nursery.start_soon(_end_with_stdin, nursery.cancel_scope)
            with Bars(shown=not end_with_stdin) as bars:

                def show(activity: Activity) -> None:
                    bars.show({f"{activity.detail} layers": activity.progress} if activity.progress else {})

                await run_node(settings, plugins, Activity(on_change=show))

    run(main)


async def _end_with_stdin(scope: trio.CancelScope) -> None:
    """Whoever started this process holds the other end of its standard input: when that closes, it is gone."""
    read = partial(os.read, 0, 4096)
    while await trio.to_thread.run_sync(read, abandon_on_cancel=True):
        pass
    scope.cancel()
