"""`core members`: the machines that were let in, and how one is turned out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.invite import table, when
from core.cli.options import StateDirectory

if TYPE_CHECKING:
    from core.trust.register import Asker, KnownNode


def members(
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Turn a machine out, at once; the others stay.")
    ] = None,
    approve: Annotated[
        str | None, typer.Option(metavar="CODE", help="Let a machine in that asks to join, and shows this code.")
    ] = None,
    deny: Annotated[
        str | None, typer.Option(metavar="CODE", help="Send a machine away that asks to join with this code.")
    ] = None,
    state_dir: StateDirectory = None,
) -> None:
    """List the machines that joined; let one in, or turn one out."""
    from core.trust.register import Register
    from core.trust.serving import is_serving
    from core.trust.state_dir import StateDir

    state = StateDir.open(state_dir)
    register = Register(state)
    if remove is not None:
        print(f"{register.remove(remove).node_id} is no member any more")
        return
    if approve is not None:
        print(f"{register.approve(approve).node_id} is a member now")
        return
    if deny is not None:
        print(f"{register.deny(deny).name} is not let in")
        return
    serving, entries = is_serving(state), register.read()
    rows = [(n.name, n.short_id, _state(n, serving), when(n.first_seen), when(n.last_seen)) for n in entries.nodes]
    print(table(("NAME", "KEY", "STATE", "FIRST SEEN", "LAST SEEN"), rows) if rows else "no members: see core invite")
    if serving:
        print_asking(entries.asking)


def print_asking(askers: list[Asker]) -> None:
    rows = [(a.code, a.name, a.host, when(a.expires)) for a in askers if a.expires > time.time()]
    if rows:
        print("\nThese ask to join. Let one in only if it shows the same code: core members --approve CODE\n")
        print(table(("CODE", "NAME", "FROM", "UNTIL"), rows))


def _state(node: KnownNode, serving: bool) -> str:
    if node.removed:
        return "removed"
    return "connected" if node.connected and serving else "away"
