"""The format: which files make a checkpoint, what their index says, how a tensor is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from safetensors import SafetensorError, safe_open

from core import Checkpoint, CheckpointError, CheckpointFormat, Progress, Source, TensorInfo
from core_plugin_safetensors.files import Directory, Files
from core_plugin_safetensors.header import damaged, read_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFormat(CheckpointFormat):
    name: ClassVar[str] = "safetensors"

    def recognises(self, source: Source) -> bool:
        path = source.path
        return path is not None and any((path / name).is_file() for name in (CONFIG, INDEX, SINGLE))

    def open(self, source: Source) -> Checkpoint:
        path = source.path
        if path is None:
            raise CheckpointError(f"there is no {source.model}", hint="check the path")
        return SafetensorsCheckpoint(Directory(path), source.trust_remote_code)


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, files: Files, trust_remote_code: bool) -> None:
        self._files = files
        self._trust_remote_code = trust_remote_code
        self._handles: dict[str, Any] = {}
        names = files.names()
        if CONFIG not in names:
            raise CheckpointError(f"{files} has no {CONFIG}", hint="give the directory or repository of a model")
        self.config = read_json(files.path(CONFIG))
        self.generation_config: Mapping[str, Any] = {}
        if GENERATION_CONFIG in names:
            self.generation_config = read_json(files.path(GENERATION_CONFIG))
        if INDEX in names:
            self._file_of = _weight_map(read_json(files.path(INDEX)))
            self.tensors = self._indexed_tensors()
        elif SINGLE in names:
            self.tensors = files.header(SINGLE) or {}
            self._file_of = dict.fromkeys(self.tensors, SINGLE)
        else:
            raise _no_weights(files, names)

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        self._files.fetch(sorted({self._file(name) for name in names}), progress)

    def read(self, name: str) -> Tensor:
        file = self._file(name)
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(file, f"{name} can't be read from it: {error}") from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CheckpointError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}",
                "only 16-bit, 32-bit and 64-bit floating-point weights are read",
                "use the unquantized checkpoint of this model",
            )
        return tensor

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(**self._files.pretrained(), trust_remote_code=self._trust_remote_code)
        # What it raises follows from what lies in the files: the tokenizers library raises plain Exception.
        except Exception as error:
            raise CheckpointError(f"the tokenizer of {self._files} can't be loaded", str(error)) from error

    def close(self) -> None:
        self._handles.clear()

    def _file(self, name: str) -> str:
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError(f"{self._files} has no tensor {name}") from None

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(self._files.path(file), framework="pt", device="cpu")
        return self._handles[file]

    def _indexed_tensors(self) -> dict[str, TensorInfo]:
        headers = {file: self._files.header(file) for file in sorted(set(self._file_of.values()))}
        tensors = {}
        for name, file in self._file_of.items():
            header = headers[file]
            if header is None:
                continue
            if name not in header:
                raise damaged(file, f"{INDEX} says that it holds {name}, and it doesn't")
            tensors[name] = header[name]
        return tensors


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise damaged(INDEX, "it has no weight_map of file names")
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and PurePath(value).name == value


def _no_weights(files: Files, names: Collection[str]) -> CheckpointError:
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return CheckpointError(
            f"{files} has no safetensors",
            "its weights are pickled, which is never read because unpickling runs code",
            "convert it to safetensors, or use a repository that has them",
        )
    return CheckpointError(f"{files} has no weights", f"it has neither {SINGLE} nor {INDEX}", "download them")
