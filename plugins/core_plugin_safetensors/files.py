"""Where a checkpoint's files lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from core import CheckpointError, Progress, TensorInfo
from core_plugin_safetensors.header import read_header


class Files(Protocol):
    """A directory, or a repository of a hub. Every method raises CheckpointError in words for people."""

    def __str__(self) -> str:
        """What to call it in errors."""

    def has(self, name: str) -> bool: ...

    def path(self, name: str) -> Path:
        """The file on this machine, brought here where it wasn't."""

    def header(self, name: str) -> Mapping[str, TensorInfo] | None:
        """The tensors of a safetensors file, without its weights; None where it can't be looked into now."""

    def fetch(self, names: Collection[str], progress: Progress | None) -> None:
        """Brings the files here."""

    def identity(self, name: str) -> str:
        """Differs whenever the file's content does."""

    def missing(self, name: str) -> CheckpointError:
        """The error that says that there is no such file."""

    def pretrained(self) -> dict[str, Any]:
        """The arguments that make a `from_pretrained` of transformers read from here."""


class Directory:
    """A local directory: everything is here already."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def path(self, name: str) -> Path:
        return self._path / name

    def header(self, name: str) -> Mapping[str, TensorInfo]:
        if not self.has(name):
            raise self.missing(name)
        return read_header(self.path(name))

    def fetch(self, names: Collection[str], progress: Progress | None) -> None:
        """Nothing to do."""

    def identity(self, name: str) -> str:
        status = self.path(name).stat()
        return f"{name}:{status.st_size}:{status.st_mtime_ns}"

    def missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self} has no {name}", hint="download it, or give another directory")

    def pretrained(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": str(self._path)}
