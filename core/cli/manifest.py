"""`core manifest`: what a model is, byte for byte, to be kept or compared with another machine's copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.console import Bars, set_up_logging, why
from core.cli.options import CacheDir, Revision
from core.errors import ConfigError, DamagedFile
from core.interfaces.checkpoint import Source

if TYPE_CHECKING:
    from core.runtime.model import Model


def manifest(
    model: Annotated[str, typer.Argument(help="A Hugging Face repo id, a model directory, or a .gguf file.")],
    out: Annotated[Path | None, typer.Option(help="Write it here, not to standard output.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash the files that are here once more, and say which are damaged.")
    ] = False,
    revision: Revision = None,
    hf_cache_dir: CacheDir = None,
) -> None:
    """List a model's files and tensors with their SHA-256, as JSON."""
    set_up_logging("warning")
    from core.plugins import PluginHost
    from core.runtime.manifest import Manifest
    from core.runtime.model import Model

    with Model.open(Source(model, revision, hf_cache_dir), PluginHost.installed()) as opened, Bars() as bars:
        if verify:
            _verify(opened, bars)
            return
        made = Manifest.of(opened, lambda done, total: bars.show({"hashing": (done, total)}))
        text = json.dumps({"model": model, **made.as_json()}, indent=2)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} can't be written", why(error), "give another --out") from error


def _verify(model: Model, bars: Bars) -> None:
    """Raises DamagedFile once all files are told."""
    from core.runtime.verification import Verdict, verify

    verdicts = verify(model, lambda done, total: bars.show({"hashing": (done, total)}))
    for name, verdict in verdicts.items():
        typer.echo(f"{name}: {verdict.value}")
    damaged = tuple(name for name, verdict in verdicts.items() if verdict is Verdict.DAMAGED)
    if damaged:
        raise DamagedFile(
            f"{' and '.join(damaged)} is damaged",
            "its bytes are not those that it had",
            "what comes from a hub is downloaded again when it is loaded; bring the rest here again",
            files=damaged,
        )
