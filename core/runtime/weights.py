"""Reading weights: each tensor is read, checked, packed and placed before the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from core.errors import CheckpointError
from core.interfaces.architecture import TensorSpec
from core.interfaces.checkpoint import Checkpoint, Progress
from core.interfaces.quantizer import Linear, Quantizer, Table
from core.runtime.plain import Plain


def check_tensors(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> None:
    """Raises CheckpointError naming the first tensor that is missing or of another shape."""
    for spec in specs:
        info = checkpoint.tensors.get(spec.name)
        if info is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {spec.name!r}",
                f"its config asks for it, with shape {list(spec.shape)}",
                "the download may be incomplete, or config.json belongs to another model",
            )
        if tuple(info.shape) != spec.shape:
            raise CheckpointError(
                f"the tensor {spec.name!r} in {info.file} has shape {list(info.shape)}",
                f"the config asks for {list(spec.shape)}",
                "config.json belongs to another model",
            )


class StageWeights:
    """The Weights of core.interfaces.architecture: only the tensors of `specs` can be had.

    `nbytes` are held by what was built so far; `read_bytes` were read from the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        specs: Iterable[TensorSpec],
        quantizer: Quantizer,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        seen: Callable[[str], None] | None = None,
    ) -> None:
        """`seen` is told each tensor that was read."""
        self._checkpoint = checkpoint
        self._specs = {spec.name: spec for spec in specs}
        self._quantizer = quantizer
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._seen = seen
        self._total = sum(checkpoint.tensors[name].nbytes for name in self._specs)
        self.nbytes = 0
        self.read_bytes = 0

    def tensor(self, name: str) -> Tensor:
        dtype = torch.float32 if self._specs[name].fp32 else self.dtype
        tensor = self._read(name).to(self.device, dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, *modules: str) -> Linear:
        weight = self._stacked([f"{module}.weight" for module in modules])
        biases = [f"{module}.bias" for module in modules if f"{module}.bias" in self._specs]
        bias = self._stacked(biases) if biases else None
        packed = self._quantizer.pack(weight, bias, dtype=self.dtype, device=self.device)
        self.nbytes += packed.nbytes
        return packed

    def table(self, name: str) -> Table:
        quantizer = table_quantizer(self._quantizer)
        packed = quantizer.pack_table(self._read(name), dtype=self.dtype, device=self.device)
        self.nbytes += packed.nbytes
        return packed

    def _stacked(self, names: Sequence[str]) -> Tensor:
        """The named tensors one below the other, in the widest of their dtypes; only one is held beside the result."""
        if len(names) == 1:
            return self._read(names[0])
        stacked, row = torch.empty(0), 0
        for name in names:
            part = self._read(name)
            if row == 0:
                stacked = part.new_empty(sum(self._specs[each].shape[0] for each in names), *part.shape[1:])
            stacked = stacked.to(torch.promote_types(stacked.dtype, part.dtype))
            stacked[row : row + len(part)] = part
            row += len(part)
        return stacked

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(self._specs[name].name)
        self.read_bytes += self._checkpoint.tensors[name].nbytes
        if self._seen is not None:
            self._seen(name)
        if self._progress is not None:
            self._progress(self.read_bytes, self._total)
        return tensor


def table_quantizer(quantizer: Quantizer) -> Quantizer:
    """What packs an embedding where `quantizer` packs linear weights."""
    return quantizer if quantizer.tables else Plain()
