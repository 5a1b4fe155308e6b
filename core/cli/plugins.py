"""`core plugins`: what is installed, what each adds, and what is broken with its cause."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.console import output, table

if TYPE_CHECKING:
    from rich.table import Table

    from core.plugins import PluginHost


def plugins(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the plugins, what each adds, and what broke one."""
    from core.plugins import PluginHost

    host = PluginHost.installed()
    if as_json:
        found = {
            "loaded": [asdict(plugin) for plugin in host.loaded],
            "broken": [asdict(plugin) for plugin in host.broken],
            "switched_off": [asdict(plugin) for plugin in host.switched_off],
        }
        print(json.dumps(found, indent=2))
    else:
        output().print(_table(host))


def _table(host: PluginHost) -> Table:
    from rich.text import Text

    from core.plugins import SWITCH

    shown = table("plugin", "distribution", "version", "adds")
    for plugin in host.loaded:
        shown.add_row(plugin.name, plugin.distribution, plugin.version, ", ".join(plugin.adds))
    for plugin in host.switched_off:
        shown.add_row(plugin.name, plugin.distribution, plugin.version, f"left out by {SWITCH}")
    for broken in host.broken:
        shown.add_row(broken.name, broken.distribution, broken.version, Text(f"broken: {broken.cause}", style="red"))
    return shown
