"""`core keys`: API keys by name, each of which can be revoked by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.console import aligned
from core.cli.invite import when
from core.cli.options import StateDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from core.trust.api_keys import ApiKeys

keys = typer.Typer(help="API keys by name: add, list, revoke.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(help="Whose key it is.")]


@keys.command("add")
def add(
    name: Name,
    host: Annotated[
        bool, typer.Option("--host", help="It may also invite machines, let them in, and turn them out.")
    ] = False,
    state_dir: StateDirectory = None,
) -> None:
    """Make a key and print it, once. From then on the API asks for one; it need not be started again."""
    key = _keys(state_dir).add(name, host=host)
    print(f"{key}\n")
    print(f"this is the key of {name}, and it is shown this once: send it like a password")
    print("it may do all that the host may" if host else "it may ask the model, and see the cluster")


@keys.command("list")
def list_(state_dir: StateDirectory = None) -> None:
    """List the keys: whose they are, and what they may do."""
    rows = [(key.name, "host" if key.host else "chat", when(key.created)) for key in _keys(state_dir).all()]
    print(aligned(("NAME", "MAY", "MADE"), *rows) if rows else "no keys: see core keys add")


@keys.command("revoke")
def revoke(name: Name, state_dir: StateDirectory = None) -> None:
    """Make a key useless, at once, and whatever browser logged in with it."""
    left = _keys(state_dir).revoke(name)
    print(f"the key of {name} is revoked")
    if left == 0:
        print("it was the last: a core serve that runs still asks for a key, so make another with core keys add NAME;")
        print("one that is started without any key asks for none, and answers to this machine alone")


def _keys(state_dir: Path | None) -> ApiKeys:
    from core.trust.api_keys import ApiKeys
    from core.trust.state_dir import StateDir

    return ApiKeys(StateDir.open(state_dir))
