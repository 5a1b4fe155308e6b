"""`core members`: the machines that were let in, and how one is turned out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.invite import table, when
from core.cli.options import StateDirectory

if TYPE_CHECKING:
    from core.trust.register import KnownNode


def members(
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Turn a machine out, at once; the others stay.")
    ] = None,
    state_dir: StateDirectory = None,
) -> None:
    """List the machines that joined by invite; turn one out."""
    from core.trust.register import Register
    from core.trust.serving import is_serving
    from core.trust.state_dir import StateDir

    state = StateDir.open(state_dir)
    register = Register(state)
    if remove is not None:
        print(f"{register.remove(remove).node_id} is no member any more")
        return
    serving, nodes = is_serving(state), register.read().nodes
    rows = [(n.name, n.short_id, _state(n, serving), when(n.first_seen), when(n.last_seen)) for n in nodes]
    print(table(("NAME", "KEY", "STATE", "FIRST SEEN", "LAST SEEN"), rows) if rows else "no members: see core invite")


def _state(node: KnownNode, serving: bool) -> str:
    if node.removed:
        return "removed"
    return "connected" if node.connected and serving else "away"
