"""Writes `docs/commands.md`: every command with every option, as the commands themselves tell it.

make docs runs this; a test holds the page against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from core.cli import app

PAGE = Path(__file__).with_name("commands.md")
COLUMNS = 110
INTRODUCTION = """\
# Commands and options

Made from the code by `make docs`. [Host a cluster](hosting.md) says which options of `core serve` matter most, and
[Join a cluster](joining.md) what `core-node`, the tray app, does.

A command ends with status 0 when it did what it was asked; 1 when that failed, or the model can't be read; 2 when an
option is wrong or can't be honoured here; and 130 after Ctrl-C. Ctrl-C and SIGTERM end cleanly those that
serve, SIGTERM with 0.
"""


def names() -> Iterator[str]:
    """Of all commands, those of groups included."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        own = getattr(command, "commands", None)
        yield from [name] if own is None else [f"{name} {each}" for each in own]


def page() -> str:
    return "\n".join([INTRODUCTION, *map(_section, names())])


def _section(name: str) -> str:
    told = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": str(COLUMNS)}, prog_name="core")
    assert told.exit_code == 0, f"core {name} --help: {told.output}"
    lines = (line.rstrip() for line in told.output.strip().splitlines())
    return f"## core {name}\n\n```text\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
