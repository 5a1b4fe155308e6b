"""Options that say who may use the API; keys come from a file or the environment, never from a command line."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from core.cli.console import why
from core.errors import ConfigError
from core.gateway.settings import KEEP_RESPONSES, ApiSettings, parse_keys
from core.interfaces.api_keys import KeyBook

KEY_VARIABLE = "CORE_API_KEY"
KEEP_RESPONSES_MINUTES = KEEP_RESPONSES / 60

ApiKeyFile = Annotated[
    Path | None, typer.Option(help=f"Who asks needs a key of this file, one a line (or of {KEY_VARIABLE}).")
]
AllowAnonymousApi = Annotated[
    bool, typer.Option("--allow-anonymous-api", help="Let everyone who reaches --api-host ask, without a key.")
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", metavar="ORIGIN", help="Let pages of it ask, such as https://chat.example; once per origin."
    ),
]

MaxTime = Annotated[
    float | None,
    typer.Option(help="Seconds that any request may take, waiting included. Default: no bound.", min=0.001),
]

KeepResponses = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        help="How long /v1/responses keeps its answers in memory, for requests that refer to them; 0: not at all.",
        min=0,
        max=1440,
    ),
]


def api_settings(
    key_file: Path | None,
    allow_anonymous: bool,
    origins: list[str],
    max_time: float | None = None,
    keep_responses: float = KEEP_RESPONSES_MINUTES,
    named_keys: KeyBook | None = None,
) -> ApiSettings:
    """Raises ConfigError for keys that can't be read, and for what contradicts itself."""
    keys = frozenset[str]()
    if key_file is not None:
        keys |= parse_keys(_read(key_file), str(key_file))
    if KEY_VARIABLE in os.environ:
        keys |= parse_keys(os.environ[KEY_VARIABLE], KEY_VARIABLE)
    return ApiSettings(
        keys,
        allow_anonymous,
        tuple(origins),
        max_time=max_time or math.inf,
        keep_responses=keep_responses * 60,
        named_keys=named_keys,
    )


def own_headers() -> dict[str, str]:
    """What commands that ask the API send along: the first key of the environment."""
    key, *_ = [*os.environ.get(KEY_VARIABLE, "").split(), ""]
    return {"authorization": f"Bearer {key}"} if key else {}


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read API keys from {path}", why(error), "give a text file, one key a line") from error
