"""The format: which files make a checkpoint, what their index says, how a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from core import (
    Checkpoint,
    CheckpointError,
    CheckpointFormat,
    FileInfo,
    Progress,
    Source,
    StoredWeight,
    TensorInfo,
)
from core.errors import MissingFile
from core_plugin_safetensors.files import Directory, Files
from core_plugin_safetensors.header import damaged, read_json, read_local_header
from core_plugin_safetensors.hub import HubFiles
from core_plugin_safetensors.quantized import find_packed, is_beside

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}

ADAPTER = "adapter_config.json"
GIT_ATTRIBUTES = ".gitattributes"
"""It is in every repository of the hub."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")

BESIDE_WEIGHTS = frozenset(
    {
        CONFIG,
        GENERATION_CONFIG,
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""What else a checkpoint may be made of, by the names that transformers looks for."""
MORE_TEMPLATES = re.compile(r"additional_chat_templates/[\w-][\w.-]*\.jinja")
"""Chat templates beside the default, by name."""

ASKED_AT_ONCE = 8
"""Big models have dozens of files, and asking a hub about one takes a fraction of a second."""

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")


class SafetensorsFormat(CheckpointFormat):
    name: ClassVar[str] = "safetensors"

    def recognises(self, source: Source) -> bool:
        path = source.path
        if path is None:
            return REPO_ID.fullmatch(source.model) is not None
        return any((path / name).is_file() for name in (CONFIG, INDEX, SINGLE, ADAPTER))

    def open(self, source: Source) -> Checkpoint:
        if source.path is not None:
            return SafetensorsCheckpoint(Directory(source.path), source.trust_remote_code)
        return SafetensorsCheckpoint(_on_hub(source), source.trust_remote_code)


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, files: Files, trust_remote_code: bool) -> None:
        self._files = files
        self._trust_remote_code = trust_remote_code
        self._layouts: dict[str, Mapping[str, TensorInfo]] = {}
        self.revision = files.commit
        if not files.has(CONFIG):
            raise _no_config(files)
        self.config = read_json(files.path(CONFIG))
        self.generation_config: Mapping[str, Any] = {}
        if files.has(GENERATION_CONFIG):
            self.generation_config = read_json(files.path(GENERATION_CONFIG))
        if files.has(INDEX):
            self._file_of = _weight_map(read_json(files.path(INDEX)))
            self.tensors = self._indexed_tensors()
        elif files.has(SINGLE):
            self.tensors = files.header(SINGLE)
            self._file_of = dict.fromkeys(self.tensors, SINGLE)
        else:
            raise _no_weights(files)
        self._packed = find_packed(self.config, self.tensors, str(files), self._peek)
        self._in_packed = {name for packed in self._packed.values() for name in packed.parts}
        self.tensors = {
            name: replace(info, bits=BITS.get(info.dtype))
            for name, info in self.tensors.items()
            if name not in self._in_packed and not is_beside(name)
        } | {name: packed.info for name, packed in self._packed.items()}

    def _peek(self, info: TensorInfo) -> bytes:
        return self._files.peek(info.file, info.offset, info.nbytes)

    def files(self) -> Mapping[str, FileInfo]:
        beside = [name for name in self._files.names() if _is_beside_weights(name)]
        for name in beside:
            self._files.path(name)
        names = sorted({*beside, *self._file_of.values()})
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self._files.info, names), strict=True))

    def path(self, file: str) -> Path | None:
        known = _is_beside_weights(file) or file in self._file_of.values()
        return self._files.cached(file) if known else None

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        stored = {part for name in names for part in self._parts(name)}
        self._files.fetch(sorted({self._file(name) for name in stored}), progress)

    def read(self, name: str) -> Tensor:
        packed = self._packed.get(name)
        if packed is None:
            return self._read_stored(name)
        import torch

        from core.blocks import dequantise

        if len(packed.info.shape) == 2:
            return dequantise(self.stored(name))
        return torch.stack(list(self.slices(name)))

    def stored(self, name: str) -> StoredWeight:
        if name not in self._packed:
            return super().stored(name)
        packed = self._packed[name]
        return packed.unpack(packed.form, [self._read_stored(part) for part in packed.parts])

    def stored_slices(self, name: str) -> Iterator[StoredWeight]:
        if name not in self._packed:
            yield from super().stored_slices(name)
            return
        packed = self._packed[name]
        for parts in zip(*map(self._stored_slices, packed.parts), strict=True):
            yield packed.unpack(packed.form, parts)

    def slices(self, name: str) -> Iterator[Tensor]:
        packed = self._packed.get(name)
        if packed is None:
            yield from self._stored_slices(name)
        elif len(packed.info.shape) == 2:
            yield from super().slices(name)
        else:
            from core.blocks import dequantise

            for weight in self.stored_slices(name):
                yield dequantise(weight).t() if packed.transposed else dequantise(weight)

    def _parts(self, name: str) -> tuple[str, ...]:
        packed = self._packed.get(name)
        return (name,) if packed is None else packed.parts

    def _stored_slices(self, name: str) -> Iterator[Tensor]:
        from core_plugin_safetensors.weights import read_tensor

        path, whole = self._stored(name)
        count, *shape = whole.shape
        nbytes = whole.nbytes // max(count, 1)
        for offset in range(whole.offset, whole.offset + count * nbytes, nbytes):
            one = replace(whole, shape=tuple(shape), nbytes=nbytes, offset=offset)
            yield read_tensor(path, name, one, packed=name in self._in_packed)

    def _read_stored(self, name: str) -> Tensor:
        from core_plugin_safetensors.weights import read_tensor

        path, stored = self._stored(name)
        return read_tensor(path, name, stored, packed=name in self._in_packed)

    def _stored(self, name: str) -> tuple[Path, TensorInfo]:
        """Where it lies, as the file says by itself."""
        file = self._file(name)
        path = self._files.path(file)
        if file not in self._layouts:
            self._layouts[file] = read_local_header(path)
        stored = self._layouts[file].get(name)
        if stored is None:
            raise damaged(file, f"{name} is not in it any more")
        return path, stored

    def set_aside(self, file: str) -> bool:
        self._layouts.pop(file, None)
        return file in self._file_of.values() and self._files.set_aside(file)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(**self._files.pretrained(), trust_remote_code=self._trust_remote_code)
        # What it raises follows from what lies in the files: the tokenizers library raises plain Exception.
        except Exception as error:
            raise CheckpointError(f"the tokenizer of {self._files} can't be loaded", str(error)) from error

    def close(self) -> None:
        self._layouts.clear()

    def _file(self, name: str) -> str:
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError(f"{self._files} has no tensor {name}") from None

    def _indexed_tensors(self) -> dict[str, TensorInfo]:
        files = sorted(set(self._file_of.values()))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            headers = dict(zip(files, pool.map(self._files.header, files), strict=True))
        tensors = {}
        for name, file in self._file_of.items():
            if name not in headers[file]:
                raise damaged(file, f"{INDEX} says that it holds {name}, and it doesn't")
            tensors[name] = headers[file][name]
        return tensors


def _is_beside_weights(name: str) -> bool:
    return name in BESIDE_WEIGHTS or MORE_TEMPLATES.fullmatch(name) is not None


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise damaged(INDEX, "it has no weight_map of file names")
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and PurePath(value).name == value


def _on_hub(source: Source) -> HubFiles:
    """Raises CheckpointError, if there is no config because the repository holds something else, with what that is."""
    try:
        return HubFiles(source.model, CONFIG, source.revision, source.cache_dir)
    except MissingFile as missing:
        raise _instead(source) or missing from None


def _instead(source: Source) -> CheckpointError | None:
    try:
        files = HubFiles(source.model, GIT_ATTRIBUTES, source.revision, source.cache_dir)
    except CheckpointError:
        return None
    return _no_config(files)


def _no_config(files: Files) -> CheckpointError:
    if files.has(ADAPTER):
        base = read_json(files.path(ADAPTER)).get("base_model_name_or_path")
        return CheckpointError(
            f"{files} is a LoRA adapter",
            f"it changes the weights of {base or 'another model'}, and has none of its own",
            "merge it into that model (merge_and_unload of the library peft), save what comes out, and give its path",
        )
    if ggufs := [name for name in files.names() if name.endswith(".gguf")]:
        return CheckpointError(f"{files} holds GGUF files", "", f"add the name of one of them: /{ggufs[0]}")
    return files.missing(CONFIG)


def _no_weights(files: Files) -> CheckpointError:
    if any(files.has(name) for name in PICKLED):
        return CheckpointError(
            f"{files} has no safetensors",
            "its weights are pickled, which is never read because unpickling runs code",
            "convert it to safetensors, or use a repository that has them",
        )
    return files.missing(SINGLE)
