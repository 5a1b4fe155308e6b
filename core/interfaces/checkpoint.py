"""The seam for checkpoint formats: a model's config, tokenizer and tensors, wherever its files lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from core.errors import CheckpointError
from core.interfaces.stored import StoredForm, StoredWeight

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while something long goes on."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is said to be: `model` as the user wrote it, a local path or a Hugging Face repo id."""

    model: str
    revision: str | None = None
    cache_dir: Path | None = None
    trust_remote_code: bool = False

    @property
    def path(self) -> Path | None:
        """The local path, where there is one by that name."""
        path = Path(self.model).expanduser()
        return path if path.exists() else None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the checkpoint stores it: `nbytes` of `file` from byte `offset` on.

    `bits` are those of a value, scales left out, where the format says so: by them `--quant auto` packs. `form` is that
    of a quantized weight which `Checkpoint.stored` gives as it is stored; None for every other tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    offset: int
    bits: int | None = None
    form: StoredForm | None = None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One of a checkpoint's files: its size in bytes, and in hexadecimal its SHA-256, where it need not be read for it.

    A hub says that of its large files.
    """

    size: int
    sha256: str | None = None


class Checkpoint(ABC):
    """An opened checkpoint: config and index are known, weights are not yet read. Closed by `close`."""

    config: Mapping[str, Any]
    """In the words of a Hugging Face config.json, whatever the format."""

    generation_config: Mapping[str, Any]
    """Likewise generation_config.json; empty where there is none."""

    tensors: Mapping[str, TensorInfo]
    """By the names that Hugging Face safetensors checkpoints use, whatever the format."""

    revision: str | None = None
    """What pins its files where they come from a hub: the commit."""

    @abstractmethod
    def files(self) -> Mapping[str, FileInfo]:
        """All that makes it: weights, config, tokenizer, chat template. Weights need not be on this machine."""

    @abstractmethod
    def path(self, file: str) -> Path | None:
        """Where one of its files lies on this machine; None where it doesn't, and for what is none of its files.

        The name may have come from another machine.
        """

    @abstractmethod
    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        """Brings the files that hold `names` to this machine, and no others."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in a floating-point dtype: the stored one, or what it dequantises to."""

    def slices(self, name: str) -> Iterator[Tensor]:
        """What `read` gives, cut along its first dimension: better a slice at a time, where that is possible."""
        yield from self.read(name)

    def stored(self, name: str) -> StoredWeight:
        """A tensor of two dimensions that has a `TensorInfo.form`, as [out_features, in_features]."""
        raise CheckpointError(f"{name} is not given as it is stored", hint="use --quant int4, int8 or fp16")

    def stored_slices(self, name: str) -> Iterator[StoredWeight]:
        """Likewise of one of three dimensions: a weight for each step along the first one."""
        raise CheckpointError(f"{name} is not given as it is stored", hint="use --quant int4, int8 or fp16")

    def set_aside(self, file: str) -> bool:
        """Puts a file out of the way that is damaged, so that `fetch` brings it again. Whether it was, and is.

        False for a file that can't be had from elsewhere, and for one that proves to be whole.
        """
        return False

    @abstractmethod
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers' PreTrainedTokenizerBase."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of files and maps. Calling it twice does no harm."""


class CheckpointFormat(ABC):
    name: ClassVar[str]

    @abstractmethod
    def recognises(self, source: Source) -> bool:
        """Whether `source` looks like this format; cheap, and never an error."""

    @abstractmethod
    def open(self, source: Source) -> Checkpoint:
        """Reads config and index. Raises CheckpointError naming the file that is missing, cut short or damaged."""
