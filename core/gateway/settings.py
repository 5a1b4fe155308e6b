"""Who may use the API, from where, and for how long."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from core.errors import ConfigError
from core.gateway.dialects.forms import ToolSettings
from core.interfaces.api_keys import KeyBook

PATIENCE = 60.0
"""For how many seconds a client may neither read what it is sent nor send what it announced."""

KEEP_RESPONSES = 3600.0

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Without keys everyone is let in, which has to be allowed beyond this machine. Whoever has one of `keys` may ask;
    those of `named_keys` may be the host's, too, and come and go while the server runs.

    `cors_origins` are those of web pages that may ask; `patience` is in seconds, like `max_time`, which is how long any
    request may take, and `keep_responses`, which is how long later requests may refer to a response; 0: not at all.
    `max_connections` None: by how many files the process may open.
    """

    keys: frozenset[str] = field(default=frozenset(), repr=False)
    allow_anonymous: bool = False
    cors_origins: tuple[str, ...] = ()
    patience: float = PATIENCE
    max_time: float = math.inf
    max_connections: int | None = None
    keep_responses: float = KEEP_RESPONSES
    named_keys: KeyBook | None = field(default=None, repr=False)
    tools: ToolSettings = field(default_factory=ToolSettings)

    @property
    def had_keys(self) -> bool:
        """Whether there are keys, or were any since the server began."""
        return bool(self.keys) or (self.named_keys is not None and self.named_keys.had_any())

    def __post_init__(self) -> None:
        if self.keys and self.allow_anonymous:
            raise ConfigError(
                "the API can't both need a key and let everyone in", hint="drop the keys or --allow-anonymous-api"
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is no origin",
                    hint="give scheme, host and port alone, as in https://chat.example, or *",
                )


def parse_keys(text: str, source: str) -> frozenset[str]:
    """The API keys of `source`, one a line. Raises ConfigError where there is none, and for a line that is no key."""
    keys = frozenset(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{source} has no API key", hint="write one in it, one a line")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"{source} has a line that is no API key", hint="use ASCII without spaces, one key a line")
    return keys
