"""Where a GGUF file lies, and the parts that a large one is split into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from core import CheckpointError, Progress
from core_plugin_gguf.header import Header, NeedsMore, parse

FIRST_LOOK = 8 << 20
"""Bytes: the head of most files, tokenizer included."""

FIRST_LOOK_AT_MORE_PARTS = 256 << 10
"""Bytes: they hold no tokenizer."""

LARGEST_HEAD = 512 << 20
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>(?!0{5})\d{5})\.gguf")
"""How llama.cpp names them."""


class File(Protocol):
    """A local file, or one of a hub. Every method raises CheckpointError in words for people."""

    name: str
    """What to call it in errors."""

    def size(self) -> int: ...

    def sha256(self) -> str | None:
        """In hexadecimal, where it need not be read for it."""

    def cached(self) -> Path | None:
        """The whole file, where it is on this machine."""

    def peek(self, start: int, nbytes: int) -> bytes:
        """Some of its bytes, fewer where it ends before; doesn't bring it here."""

    def bring(self, progress: Progress | None = None) -> Path:
        """The whole file on this machine."""

    def set_aside(self) -> bool:
        """Puts it out of the way if it is damaged, to be brought again; whether it was, and is."""

    def sibling(self, name: str) -> Self:
        """The file of that name, which is as complete as this one's, in the same place."""


class LocalFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name

    def size(self) -> int:
        return self._path.stat().st_size

    def sha256(self) -> str | None:
        return None

    def cached(self) -> Path | None:
        return self._path

    def peek(self, start: int, nbytes: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                return file.read(nbytes)
        except OSError as error:
            raise CheckpointError(f"{self._path} can't be read", str(error)) from error

    def bring(self, progress: Progress | None = None) -> Path:
        return self._path

    def set_aside(self) -> bool:
        """There is no other place to have it from."""
        return False

    def sibling(self, name: str) -> LocalFile:
        return LocalFile(self._path.with_name(name))


def parts_of(file: File) -> list[File]:
    """All parts of the model that `file` is the whole or a part of, by their names."""
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = part["count"]
    return [file.sibling(f"{part['stem']}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def bring_all(files: Sequence[File], progress: Progress | None) -> None:
    """`progress` counts the bytes of all of them."""
    sizes = [file.size() for file in files]
    for index, file in enumerate(files):
        file.bring(_behind(sum(sizes[:index]), sum(sizes), progress))


def _behind(before: int, total: int, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


def read_head(file: File, nbytes: int | None = None) -> Header:
    """Config and index of `file`, from its first bytes alone: `nbytes` of them, or more where they end too early."""
    nbytes = nbytes or FIRST_LOOK
    while nbytes <= LARGEST_HEAD:
        try:
            return parse(memoryview(file.peek(0, nbytes)), file.size(), file.name)
        except NeedsMore:
            nbytes *= 4
        except CheckpointError:
            if not file.set_aside():
                raise
    raise CheckpointError(f"{file.name} is damaged", f"its header says that it takes over {LARGEST_HEAD} bytes")
