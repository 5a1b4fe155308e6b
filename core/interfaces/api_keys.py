"""Named API keys, as the gateway is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Whose key it is. `host` may do what is the host's: invite machines, let them in, turn them out."""

    name: str
    host: bool


class KeyBook(Protocol):
    """Any thread may ask; what others change in it holds at once."""

    def had_any(self) -> bool:
        """Whether there is a key, or was one since the server began: that all are revoked opens nothing."""

    def holder(self, digest: bytes) -> KeyHolder | None:
        """Of the key with this SHA-256; None if there is none, or it was revoked."""
