"""Options that say how a model is told of messages and tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from core.cli.console import why
from core.errors import ConfigError
from core.gateway.dialects.forms import ToolFormat

ChatTemplate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A chat template (Jinja) in place of the model's own.")
]
ToolFormatOption = Annotated[
    ToolFormat | None,
    typer.Option("--tool-format", help="How the model writes tool calls. Default: as its chat template says."),
]
ToolsAsText = Annotated[
    bool,
    typer.Option(
        "--tools-as-text",
        help="Tell tools as text, in the form of Hermes, where the chat template has no place for them.",
    ),
]


def read_template(path: Path) -> str:
    """Raises ConfigError for a file that can't be read, or whose text is no template."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        source = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read a chat template from {path}", why(error), "give a text file") from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError as error:
        if error.message is None or "'generation'" not in error.message:  # a tag of transformers' own
            raise ConfigError(
                f"{path} is no chat template", f"line {error.lineno}: {error.message}", "mend it, or choose another"
            ) from error
    return source
