"""Where a checkpoint's files lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from core import CheckpointError, FileInfo, Progress, TensorInfo
from core_plugin_safetensors.header import read_local_header


class Files(Protocol):
    """A directory, or a repository of a hub. Every method raises CheckpointError in words for people."""

    def __str__(self) -> str:
        """What to call it in errors."""

    @property
    def commit(self) -> str | None:
        """What pins the files, where anything does."""

    def names(self) -> list[str]:
        """All that are there, in folders of the first level too."""

    def has(self, name: str) -> bool: ...

    def info(self, name: str) -> FileInfo: ...

    def path(self, name: str) -> Path:
        """The file on this machine, brought here where it wasn't."""

    def cached(self, name: str) -> Path | None:
        """The file, where it is on this machine."""

    def header(self, name: str) -> Mapping[str, TensorInfo]:
        """The tensors of a safetensors file, without its weights."""

    def peek(self, name: str, start: int, nbytes: int) -> bytes:
        """Some bytes of a file, fewer where it ends before; the rest isn't brought here."""

    def fetch(self, names: Collection[str], progress: Progress | None) -> None:
        """Brings the files here."""

    def set_aside(self, name: str) -> bool:
        """Puts a damaged file out of the way, to be fetched again; whether it was, and is."""

    def missing(self, name: str) -> CheckpointError:
        """The error that says that there is no such file."""

    def pretrained(self) -> dict[str, Any]:
        """The arguments that make a `from_pretrained` of transformers read from here."""


class Directory:
    """A local directory: everything is here already."""

    commit = None

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        found = (path for pattern in ("*", "*/*") for path in self._path.glob(pattern) if path.is_file())
        return sorted(path.relative_to(self._path).as_posix() for path in found)

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def info(self, name: str) -> FileInfo:
        return FileInfo(self.path(name).stat().st_size)

    def path(self, name: str) -> Path:
        return self._path / name

    def cached(self, name: str) -> Path | None:
        return self.path(name) if self.has(name) else None

    def header(self, name: str) -> Mapping[str, TensorInfo]:
        if not self.has(name):
            raise self.missing(name)
        return read_local_header(self.path(name))

    def peek(self, name: str, start: int, nbytes: int) -> bytes:
        try:
            with self.path(name).open("rb") as file:
                file.seek(start)
                return file.read(nbytes)
        except OSError as error:
            raise CheckpointError(f"{self.path(name)} can't be read", str(error)) from error

    def fetch(self, names: Collection[str], progress: Progress | None) -> None:
        """Nothing to do."""

    def set_aside(self, name: str) -> bool:
        """There is no other place to have it from."""
        return False

    def missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self} has no {name}", hint="download it, or give another directory")

    def pretrained(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": str(self._path)}
