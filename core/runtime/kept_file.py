"""A small file in the user's cache, of what a process found out and the next one need not find out again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from platformdirs import user_cache_path

T = TypeVar("T")


class KeptFile(Generic[T]):
    """Where it is missing, damaged or can't be written, nothing was kept. Its place is the user's cache, or `path`."""

    def __init__(self, name: str, kind: type[T], path: Path | None = None) -> None:
        self.path = path or user_cache_path("core") / name
        self._kind = kind

    def read(self) -> T | None:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=self._kind)
        except (OSError, ValueError):
            return None

    def write(self, content: T) -> None:
        """Whole or not at all."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(msgspec.json.encode(content))
            Path(file.name).replace(self.path)
        except OSError:
            return
