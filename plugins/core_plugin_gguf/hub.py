"""A GGUF file in a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from core import Progress
from core.hub import Repository


class HubFile:
    """Its head is read from the hub, and the rest stays there until it is brought."""

    def __init__(self, repository: Repository, name: str) -> None:
        self.name = name
        self._repository = repository

    def size(self) -> int:
        return self._repository.size(self.name)

    def sha256(self) -> str | None:
        return self._repository.sha256(self.name)

    def cached(self) -> Path | None:
        return self._repository.cached(self.name)

    def peek(self, start: int, nbytes: int) -> bytes:
        return self._repository.peek(self.name, start, nbytes)

    def bring(self, progress: Progress | None = None) -> Path:
        self._repository.fetch([self.name], progress)
        return self._repository.path(self.name)

    def set_aside(self) -> bool:
        return self._repository.set_aside(self.name)

    def sibling(self, name: str) -> HubFile:
        return HubFile(self._repository, name)
