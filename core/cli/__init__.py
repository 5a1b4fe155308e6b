"""The `core` command. Whatever is slow to import is imported inside the commands, so that `core --help` is fast."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from core import __version__
from core.cli import (
    bench,
    chat,
    demo,
    doctor,
    invite,
    keys,
    manifest,
    members,
    node,
    plan,
    plugins,
    rebalance,
    serve,
    top,
)
from core.errors import ConfigError, CoreError, PluginError, leaves
from core.one_line import one_line

app = typer.Typer(
    help="Pool machines into one cluster that serves a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of long options
)
app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("invite")(invite.invite)
app.command("members")(members.members)
app.add_typer(keys.keys, name="keys")
app.command("demo")(demo.demo)
app.command("chat")(chat.chat)
app.command("top")(top.top)
app.command("rebalance")(rebalance.rebalance)
app.command("plan")(plan.plan)
app.command("manifest")(manifest.manifest)
app.command("plugins")(plugins.plugins)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Runs `core`: a CoreError becomes lines on stderr and an exit status, and what is a bug keeps its traceback.

    The status is 2 for what can't be done as it was asked, 1 for what failed, 130 after Ctrl-C.
    """
    status = 0
    try:
        app()
    except* KeyboardInterrupt:
        status = 130
    except* CoreError as group:
        for error in leaves(group):
            status = max(status, _report(error))
    finally:
        gc.freeze()  # what is left is freed by the process's end: not to be gone through first, torch and all
    sys.exit(status)


def _report(error: CoreError) -> int:
    print(one_line(f"{error.title}: {error.message}" if error.message else error.title), file=sys.stderr)
    if error.hint:
        print(one_line(error.hint), file=sys.stderr)
    return 2 if isinstance(error, (ConfigError, PluginError)) else 1


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"core {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
