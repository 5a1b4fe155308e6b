"""A repository of the Hugging Face hub that holds safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import SafetensorsParsingError

from core import CheckpointError, TensorInfo
from core.hub import Repository
from core_plugin_safetensors.header import read_header, tensor_info


class HubFiles(Repository):
    """Headers are read from the hub, and weights stay there until they are fetched."""

    def header(self, name: str) -> Mapping[str, TensorInfo] | None:
        cached = self.cached(name)
        if cached is not None:
            return read_header(cached)
        return None if self.offline else self._header_on_hub(name)

    def pretrained(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.repo_id,
            "revision": self.commit,
            "cache_dir": self.cache_dir,
            "local_files_only": self.offline,
        }

    def _header_on_hub(self, name: str) -> Mapping[str, TensorInfo]:
        with self.translated(name):
            try:
                found = HfApi().parse_safetensors_file_metadata(self.repo_id, name, revision=self.commit)
            except SafetensorsParsingError as error:
                hint = "use another repository, or tell its owner"
                raise CheckpointError(f"{name} of {self} is damaged", str(error), hint) from error
            return {
                tensor: tensor_info(name, tensor, entry.dtype, entry.shape, entry.data_offsets)
                for tensor, entry in found.tensors.items()
            }
