"""The format: config, tokenizer and weights in one file, or in the parts of one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np

from core import (
    Checkpoint,
    CheckpointError,
    CheckpointFormat,
    FileInfo,
    Progress,
    Source,
    StoredForm,
    StoredWeight,
    TensorInfo,
    Values,
)
from core.hub import Repository
from core_plugin_gguf.config import read_config, read_generation_config
from core_plugin_gguf.families import FAMILIES
from core_plugin_gguf.files import (
    FIRST_LOOK_AT_MORE_PARTS,
    File,
    LocalFile,
    bring_all,
    parts_of,
    read_head,
)
from core_plugin_gguf.header import StoredTensor
from core_plugin_gguf.hub import HubFile
from core_plugin_gguf.metadata import Metadata
from core_plugin_gguf.names import FACTORS, hub_tensors
from core_plugin_gguf.rope import Factors
from core_plugin_gguf.tokenizer import load_tokenizer
from core_plugin_gguf.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

FORMS = {
    "Q4_0": StoredForm(Values.INT4, 32),
    "Q4_1": StoredForm(Values.INT4, 32, zeros=True),
    "Q8_0": StoredForm(Values.INT8, 32),
    "MXFP4": StoredForm(Values.E2M1, 32, scale_bytes=1),
}
"""By the types of what can be kept as it is stored: blocks of a row, each with a scale."""
HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)/(?P<file>.+\.gguf)")


class GgufFormat(CheckpointFormat):
    name: ClassVar[str] = "gguf"

    def recognises(self, source: Source) -> bool:
        return source.model.endswith(".gguf") and (
            source.path is not None or HUB_FILE.fullmatch(source.model) is not None
        )

    def open(self, source: Source) -> Checkpoint:
        if source.path is not None:
            return GgufCheckpoint(LocalFile(source.path), None)
        on_hub = HUB_FILE.fullmatch(source.model)
        if on_hub is None:
            raise CheckpointError(f"there is no {source.model}", hint="check the path")
        repository = Repository(on_hub["repo"], on_hub["file"], source.revision, source.cache_dir)
        return GgufCheckpoint(HubFile(repository, on_hub["file"]), repository.commit)


class GgufCheckpoint(Checkpoint):
    """One file, or several that a large model is split into: then the first one has the config and the tokenizer."""

    def __init__(self, file: File, revision: str | None) -> None:
        self.revision = revision
        first, *more = parts_of(file)
        header = read_head(first)
        metadata = Metadata(header.metadata, first.name)
        if metadata.parts != 1 + len(more):
            raise CheckpointError(
                f"{first.name} says that it is one of {metadata.parts} parts",
                "its name says otherwise",
                "name the parts model-00001-of-00003.gguf and so on, and the first one to core",
            )
        heads = [(first, header), *((part, read_head(part, FIRST_LOOK_AT_MORE_PARTS)) for part in more)]
        stored = {name: (part, at) for part, head in heads for name, at in head.tensors.items()}
        self._first = first
        self._parts = [first, *more]
        self._opened: dict[str, BinaryIO] = {}
        self._metadata_end = header.metadata_end
        shapes = {name: at.shape for name, (_, at) in stored.items()}
        self._vocabulary = Vocabulary(header, first.name)
        self.config = read_config(metadata, self._vocabulary, shapes, _rope_factors(stored))
        self._family = FAMILIES[metadata.architecture]
        self.generation_config = read_generation_config(metadata, self._vocabulary)
        self._stored = {
            hub: (part, own)
            for name, (part, at) in stored.items()
            if name not in FACTORS
            for hub, own in hub_tensors(name, at, metadata.architecture)
        }
        self.tensors = {name: _info(part, at) for name, (part, at) in self._stored.items()}

    def files(self) -> Mapping[str, FileInfo]:
        return {part.name: FileInfo(part.size(), part.sha256()) for part in self._parts}

    def path(self, file: str) -> Path | None:
        return next((part.cached() for part in self._parts if part.name == file), None)

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        needed = {part.name: part for part, _ in map(self._find, names)}
        bring_all(list(needed.values()), progress)

    def read(self, name: str) -> Tensor:
        from core_plugin_gguf.weights import read_tensor

        part, stored = self._find(name)
        tensor = read_tensor(self._open(part), name, stored, self._interleaved_heads(name))
        return tensor.sub_(1) if self._family.unit_offset and name.endswith("norm.weight") else tensor

    def stored(self, name: str) -> StoredWeight:
        from core_plugin_gguf.weights import read_stored

        part, stored = self._find(name)
        form = self.tensors[name].form
        if form is None:
            return super().stored(name)
        return read_stored(self._open(part), stored, form, self._interleaved_heads(name))

    def set_aside(self, file: str) -> bool:
        self.close()
        return any(part.set_aside() for part in self._parts if part.name == file)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._first.peek(0, self._metadata_end), self._vocabulary, self._first.name)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _find(self, name: str) -> tuple[File, StoredTensor]:
        try:
            return self._stored[name]
        except KeyError:
            raise CheckpointError(f"{self._first.name} has no tensor {name}") from None

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' halves are interleaved in the rows of this tensor; 0 for none."""
        of_whom = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"} if self._family.interleaved else {}
        heads = next((int(self.config[key]) for module, key in of_whom.items() if f".{module}." in name), 0)
        part, stored = self._find(name)
        if heads and stored.shape[0] % (2 * heads):
            raise CheckpointError(f"{name} of {part.name} has {stored.shape[0]} rows for {heads} heads")
        return heads

    def _open(self, part: File) -> BinaryIO:
        if part.name not in self._opened:
            self._opened[part.name] = part.bring().open("rb")
        return self._opened[part.name]


def _info(part: File, at: StoredTensor) -> TensorInfo:
    kind = at.type.name
    form = FORMS.get(kind) if len(at.shape) == 2 else None
    return TensorInfo(at.shape, kind, at.nbytes, part.name, at.start, _bits(kind), form)


def _bits(type_name: str) -> int | None:
    """As the type's name says: 4 of Q4_K, IQ4_XS and MXFP4."""
    digits = re.search(r"\d+", type_name)
    return int(digits[0]) if digits else None


def _rope_factors(stored: Mapping[str, tuple[File, StoredTensor]]) -> Factors:
    found = {name: stored[name] for name in FACTORS if name in stored}
    return {name: np.frombuffer(part.peek(at.start, at.nbytes), np.float32) for name, (part, at) in found.items()}
