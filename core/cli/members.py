"""`core members`: the machines that were let in, and how one is turned out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.console import aligned
from core.cli.invite import when
from core.cli.options import StateDirectory, one_of

if TYPE_CHECKING:
    from core.trust.register import Asker, KnownNode


def members(
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Turn a machine out, at once; the others stay. By its name, or the key at the name's end.",
        ),
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

    one_of({"--remove": remove, "--approve": approve, "--deny": deny})
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
    rows = [_row(node, connected=node.connected and serving) for node in entries.nodes if not node.removed]
    print(aligned(("NAME", "STATE", "FIRST SEEN", "LAST SEEN"), *rows) if rows else "no members: see core invite")
    if serving:
        print_asking(entries.asking)


def _row(node: KnownNode, *, connected: bool) -> tuple[str, ...]:
    state, seen = ("connected", "now") if connected else ("away", when(node.last_seen))
    return node.node_id, state, when(node.first_seen), seen


def print_asking(askers: list[Asker]) -> None:
    rows = [(a.code, a.name, a.host, when(a.expires)) for a in askers if a.expires > time.time()]
    if rows:
        print("\nThese ask to join. Let one in only if it shows the same code: core members --approve CODE\n")
        print(aligned(("CODE", "NAME", "FROM", "UNTIL"), *rows))
