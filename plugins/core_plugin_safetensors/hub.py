"""A repository of the Hugging Face hub that holds safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from core import CheckpointError, FileInfo, TensorInfo
from core.hub import Repository
from core_plugin_safetensors.header import read_header


class HubFiles(Repository):
    """Headers are read from the hub, and weights stay there until they are fetched."""

    def header(self, name: str) -> Mapping[str, TensorInfo]:
        if self.offline and not self.has(name):
            raise self.missing(name)
        try:
            return read_header(name, self.size(name), partial(self.peek, name))
        except CheckpointError:
            if not self.set_aside(name):
                raise
            return read_header(name, self.size(name), partial(self.peek, name))

    def info(self, name: str) -> FileInfo:
        return FileInfo(self.size(name), self.sha256(name))

    def pretrained(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.repo_id,
            "revision": self.commit,
            "cache_dir": self.cache_dir,
            "local_files_only": self.offline,
        }
