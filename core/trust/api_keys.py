"""Named API keys: each is shown once, when it is made, and kept as a hash. A file that every `core` may edit.

A key has 192 random bits, so that its plain SHA-256 tells nothing of it.
"""

from __future__ import annotations

import re
import secrets
import time
from hashlib import sha256

import msgspec

from core.errors import ConfigError
from core.interfaces.api_keys import KeyHolder
from core.trust.state_dir import StateDir

FILE = "keys.json"
PREFIX = "core-"
_NAME = re.compile(r"[\w.-]{1,40}")


class NamedKey(msgspec.Struct, frozen=True):
    """`digest` is the key's SHA-256 in hex, `created` in seconds since 1970."""

    name: str
    digest: str
    created: int
    host: bool = False


class ApiKeys:
    """The KeyBook of core.interfaces.api_keys. Each method raises ConfigError for a file that does not read."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._at_first = state.version(FILE)
        self._seen: tuple[int, int] | None = None
        self._by_digest: dict[str, NamedKey] = {}

    def all(self) -> list[NamedKey]:
        data = self._state.read(FILE)
        try:
            return msgspec.json.decode(data, type=list[NamedKey]) if data is not None else []
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{self._state.path / FILE} does not read", str(error), "mend it, or move it away to begin anew"
            ) from None

    def add(self, name: str, *, host: bool) -> str:
        """A new key. Raises ConfigError for a name that can't be, or that another key has."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a key", "", "use up to 40 letters, digits, dots and hyphens")
        key = PREFIX + secrets.token_urlsafe(24)
        with self._state.lock():
            keys = self.all()
            if any(each.name == name for each in keys):
                raise ConfigError(f"there is a key {name!r}", "", f"core keys revoke {name}, or give another name")
            self._write([*keys, NamedKey(name, digest(key).hex(), int(time.time()), host)])
        return key

    def revoke(self, name: str) -> int:
        """Gives how many keys are left. Raises ConfigError where there is none of that name."""
        with self._state.lock():
            keys = self.all()
            left = [each for each in keys if each.name != name]
            if len(left) == len(keys):
                raise ConfigError(f"there is no key {name!r}", "", "see `core keys list`")
            self._write(left)
        return len(left)

    def had_any(self) -> bool:
        """A file without keys that is another one than at first had a key in between."""
        return bool(self._present()) or self._state.version(FILE) != self._at_first

    def holder(self, digest: bytes) -> KeyHolder | None:
        key = self._present().get(digest.hex())
        return KeyHolder(key.name, key.host) if key is not None else None

    def _present(self) -> dict[str, NamedKey]:
        version = self._state.version(FILE)
        if version != self._seen:
            self._by_digest, self._seen = {key.digest: key for key in self.all()}, version
        return self._by_digest

    def _write(self, keys: list[NamedKey]) -> None:
        self._state.write(FILE, msgspec.json.format(msgspec.json.encode(keys)))


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
