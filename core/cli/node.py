"""`core node`: offers this machine's device to a coordinator."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer

from core.cli.console import Bars, gigabytes, run, set_up_logging
from core.cli.joining import find_membership
from core.cli.options import CacheDir, Compile, Device, LogLevel, StateDirectory, Threads
from core.cli.work_dir import use_work_dir
from core.coordinator.local_nodes import LOCAL_TOKEN
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.node.state import Activity
    from core.trust.cluster import Membership
    from core.trust.state_dir import StateDir

PATIENCE_SECONDS = 10.0
"""What a node that is to end gives the generations that run on it."""
MAX_LABELS = 16
_log = logging.getLogger(__name__)


def node(
    join: Annotated[
        str | None, typer.Option(help="An invite: a file with the link, or - for standard input. Or set CORE_JOIN.")
    ] = None,
    find: Annotated[
        bool, typer.Option("--find", help="Look for a cluster on the local network, and ask its host to be let in.")
    ] = False,
    ask: Annotated[
        str | None, typer.Option(metavar="KEY", help="As --find, where several are found: which one, by its key.")
    ] = None,
    cluster_host: Annotated[
        str | None, typer.Option(help="The coordinator's host. Default: that of the last invite, or this machine.")
    ] = None,
    cluster_port: Annotated[
        int | None, typer.Option(help="The coordinator's node port. Default: the invite's, or 7001.", min=1, max=65535)
    ] = None,
    device: Device = "auto",
    node_id: Annotated[
        str,
        typer.Option(
            help="A stable name for this node; a part of its key is added where it joins by invite."
            " Default: the host name, with the process where it needs no invite."
        ),
    ] = "",
    state_dir: StateDirectory = None,
    hf_cache_dir: CacheDir = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where temporary files, parts of downloads and compiled code are kept. Default: the system's places."
        ),
    ] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option(help="Offer at most this much memory.", min=0.001, max=10**6)
    ] = None,
    threads: Threads = None,
    compiles: Compile = False,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="A word for this machine that planners may heed; once per word."),
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="How machines reach each other. Default: as the invite says, or trio-websocket.")
    ] = None,
    log_level: LogLevel = "info",
    peer_host: Annotated[str | None, typer.Option(hidden=True)] = None,
    end_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Join a cluster with this machine. It loads the layers that it is assigned, and serves them."""
    local_token = _local_token()
    set_up_logging(log_level)
    if work_dir is not None:
        use_work_dir(work_dir)
    from core.trust.serving import DEFAULT_PORT
    from core.trust.state_dir import StateDir

    state = StateDir.open(state_dir)
    asks = find or ask is not None
    membership = (
        _asking(ask, join, cluster_host or cluster_port, state)
        if asks
        else find_membership(join, cluster_host, cluster_port, state)
    )
    # The imports that take seconds come after the link is read, so that whoever is to paste it is asked at once.
    from core.node.agent import run_node
    from core.node.settings import NodeSettings
    from core.node.state import Activity, Duty
    from core.plugins import PluginHost

    settings = NodeSettings(
        node_id=node_id or (socket.gethostname() if membership else f"{socket.gethostname()}-{os.getpid()}"),
        membership=membership,
        cluster_host="127.0.0.1" if cluster_host is None else cluster_host,
        cluster_port=cluster_port or DEFAULT_PORT,
        device=device,
        hf_cache_dir=hf_cache_dir,
        max_memory=gigabytes(max_memory_gb),
        threads=threads,
        compiles=compiles,
        labels=_labels(label or ()),
        transport=transport,
        peer_host=peer_host,
        local_token=local_token,
    )
    plugins, duty = PluginHost.installed(), Duty()

    def leave() -> None:
        _log.info("leaving: what runs here is finished first, within %g s; once more ends it at once", PATIENCE_SECONDS)
        duty.leave("its user ended it", PATIENCE_SECONDS)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if end_with_stdin:
                nursery.start_soon(_end_with_stdin, nursery.cancel_scope)
            with Bars(shown=not end_with_stdin) as bars:
                teller = _Teller(bars, told=not end_with_stdin)
                await run_node(settings, plugins, Activity(on_change=teller.show), duty)
            nursery.cancel_scope.cancel()

    run(main, end=leave)


def _labels(words: Sequence[str]) -> tuple[str, ...]:
    """Raises ConfigError for what is no word, or too many of them."""
    odd = [word for word in words if not re.fullmatch(r"[\w.-]{1,64}", word)]
    if odd or len(words) > MAX_LABELS:
        wrong = f"--label {odd[0]!r} is no word" if odd else f"{len(words)} labels are too many"
        hint = f"at most {MAX_LABELS}, of letters, digits, '.', '_' and '-'"
        raise ConfigError(wrong, "", hint)
    return tuple(dict.fromkeys(words))


def _local_token() -> bytes | None:
    """Taken out of the environment, where others could read it. Raises ConfigError for what is no token."""
    given = os.environ.pop(LOCAL_TOKEN, "")
    try:
        token = bytes.fromhex(given)
    except ValueError:
        token = b""
    if given and not 16 <= len(token) <= 64:
        raise ConfigError(f"{LOCAL_TOKEN} is no token", "16 to 64 bytes in hexadecimal are expected", "leave it unset")
    return token or None


class _Teller:
    """Says in a line what the node does, when that changes, and shows a bar while it downloads or loads.

    Not `told`: whoever started this process says it.
    """

    def __init__(self, bars: Bars, *, told: bool) -> None:
        self._bars = bars
        self._told = told
        self._said = ""

    def show(self, activity: Activity) -> None:
        if activity.progress is None:
            self._say(activity)
        self._bars.show({f"{activity.detail} layers": activity.progress} if activity.progress else {})

    def _say(self, activity: Activity) -> None:
        layers = f" layers [{activity.layers.start}, {activity.layers.stop})" if activity.layers else ""
        detail = f": {activity.detail}" if activity.detail and activity.state != "connecting" else ""
        match activity.state:
            case "asking":
                said = activity.detail
            case "unreachable":
                said = "the host is off or out of reach: this machine keeps trying"
            case "waiting":
                said = "waiting for a plan that gives this machine layers"
            case state:
                said = f"{state}{layers}{detail}"
        if said != self._said and (self._told or activity.state == "asking"):
            typer.echo(said)
        self._said = said


def _asking(key: str | None, join: str | None, elsewhere: str | int | None, state: StateDir) -> Membership:
    """Raises ConfigError where no cluster, or several, can be asked; NoMulticast where this machine can't look."""
    from core.cli.joining import ask, describe
    from core.discovery.multicast import find

    if join is not None or elsewhere is not None:
        raise ConfigError(
            "--find with an address", "a cluster that is found says where it is", "leave out --join or --cluster-host"
        )
    found = trio.run(find)
    if found:
        typer.echo(describe(found))
    return ask(key, found, state)


async def _end_with_stdin(scope: trio.CancelScope) -> None:
    """Whoever started this process holds the other end of its standard input: when that closes, it is gone."""
    read = partial(os.read, 0, 4096)
    while await trio.to_thread.run_sync(read, abandon_on_cancel=True):
        pass
    scope.cancel()
