"""`core manifest`: what a model is, byte for byte, to be kept or compared with another machine's copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from core.cli.console import Bars, set_up_logging, why
from core.cli.options import CacheDir, Revision
from core.errors import ConfigError
from core.interfaces.checkpoint import Source


def manifest(
    model: Annotated[str, typer.Argument(help="A Hugging Face repo id, a model directory, or a .gguf file.")],
    out: Annotated[Path | None, typer.Option(help="Write it here, not to standard output.")] = None,
    revision: Revision = None,
    hf_cache_dir: CacheDir = None,
) -> None:
    """List a model's files and tensors with their SHA-256, as JSON."""
    set_up_logging("warning")
    from core.plugins import PluginHost
    from core.runtime.manifest import Manifest
    from core.runtime.model import Model

    with Model.open(Source(model, revision, hf_cache_dir), PluginHost.installed()) as opened, Bars() as bars:
        made = Manifest.of(opened, lambda done, total: bars.show({"hashing": (done, total)}))
        text = json.dumps({"model": model, **made.as_json()}, indent=2)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} can't be written", why(error), "give another --out") from error
