"""Where a GGUF file lies."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from core import CheckpointError, Progress
from core_plugin_gguf.header import Header, NeedsMore, parse

FIRST_LOOK = 8 << 20
"""Bytes: the head of most files, tokenizer included."""

LARGEST_HEAD = 512 << 20


class File(Protocol):
    """A local file, or one of a hub. Every method raises CheckpointError in words for people."""

    name: str
    """What to call it in errors."""

    def size(self) -> int: ...

    def peek(self, start: int, nbytes: int) -> bytes:
        """Some of its bytes, fewer where it ends before; doesn't bring it here."""

    def bring(self, progress: Progress | None = None) -> Path:
        """The whole file on this machine."""


class LocalFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name

    def size(self) -> int:
        return self._path.stat().st_size

    def peek(self, start: int, nbytes: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                return file.read(nbytes)
        except OSError as error:
            raise CheckpointError(f"{self._path} can't be read", str(error)) from error

    def bring(self, progress: Progress | None = None) -> Path:
        return self._path


def read_head(file: File) -> Header:
    """Config and index of `file`, from its first bytes alone."""
    nbytes = FIRST_LOOK
    while nbytes <= LARGEST_HEAD:
        try:
            return parse(memoryview(file.peek(0, nbytes)), file.size(), file.name)
        except NeedsMore:
            nbytes *= 4
    raise CheckpointError(f"{file.name} is damaged", f"its header says that it takes over {LARGEST_HEAD} bytes")
