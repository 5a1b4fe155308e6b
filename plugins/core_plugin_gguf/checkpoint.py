"""The format: one file that holds config, tokenizer and weights."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np

from core import Checkpoint, CheckpointError, CheckpointFormat, Progress, Source, TensorInfo
from core_plugin_gguf.config import (
    PERMUTED,
    ROPE_FACTORS,
    Factors,
    Metadata,
    hub_name,
    read_config,
    read_generation_config,
)
from core_plugin_gguf.files import File, LocalFile, read_head
from core_plugin_gguf.header import Header, StoredTensor
from core_plugin_gguf.hub import HubFile
from core_plugin_gguf.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)/(?P<file>.+\.gguf)")


class GgufFormat(CheckpointFormat):
    name: ClassVar[str] = "gguf"

    def recognises(self, source: Source) -> bool:
        return source.model.endswith(".gguf") and (
            source.path is not None or HUB_FILE.fullmatch(source.model) is not None
        )

    def open(self, source: Source) -> Checkpoint:
        if source.path is not None:
            return GgufCheckpoint(LocalFile(source.path))
        on_hub = HUB_FILE.fullmatch(source.model)
        if on_hub is None:
            raise CheckpointError(f"there is no {source.model}", hint="check the path")
        return GgufCheckpoint(HubFile(on_hub["repo"], on_hub["file"], source.revision, source.cache_dir))


class GgufCheckpoint(Checkpoint):
    def __init__(self, file: File) -> None:
        self._file = file
        self._opened: BinaryIO | None = None
        header = read_head(file)
        metadata = Metadata(header.metadata, file.name)
        self._metadata_end = header.metadata_end
        self.config = read_config(metadata, header, _rope_factors(file, header))
        self.generation_config = read_generation_config(metadata)
        self._stored = {hub_name(name): at for name, at in header.tensors.items() if name != ROPE_FACTORS}
        self.tensors = {
            name: TensorInfo(stored.shape, stored.type.name, stored.nbytes, file.name)
            for name, stored in self._stored.items()
        }

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        for name in names:
            self._find(name)
        if names:
            self._file.bring(progress)

    def read(self, name: str) -> Tensor:
        from core_plugin_gguf.weights import read_tensor

        stored = self._find(name)
        heads = self._interleaved_heads(name)
        if heads and stored.shape[0] % (2 * heads):
            raise CheckpointError(f"{name} of {self._file.name} has {stored.shape[0]} rows for {heads} heads")
        return read_tensor(self._open(), name, stored, heads)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._file.peek(0, self._metadata_end), self._file.name)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._stored[name]
        except KeyError:
            raise CheckpointError(f"{self._file.name} has no tensor {name}") from None

    def _interleaved_heads(self, name: str) -> int:
        if self.config["model_type"] not in PERMUTED:
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0

    def _open(self) -> BinaryIO:
        if self._opened is None:
            self._opened = self._file.bring().open("rb")
        return self._opened


def _rope_factors(file: File, header: Header) -> Factors | None:
    stored = header.tensors.get(ROPE_FACTORS)
    return None if stored is None else np.frombuffer(file.peek(stored.start, stored.nbytes), np.float32)
