"""Reading weights: each tensor is read, checked, packed and placed before the next one is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from core.errors import CheckpointError
from core.interfaces.architecture import TensorSpec
from core.interfaces.checkpoint import Checkpoint, Progress
from core.interfaces.quantizer import Embedding, GroupedLinear, Linear, Quantizer
from core.interfaces.stored import StoredWeight
from core.runtime.experts import PackedExperts, pack_experts
from core.runtime.held_layers import Key, Part, Parts
from core.runtime.stored_weights import fuse
from core.runtime.unquantized import Plain

T = TypeVar("T")


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
    """The Weights of core.interfaces.architecture: what `parts` has is taken from there, and nothing else can be had
    but the tensors of `specs`.

    `nbytes` are held by what was asked for so far; `read_bytes` were read from the checkpoint.
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
        parts: Parts | None = None,
    ) -> None:
        """`seen` is told each tensor that was read; what is made of them is added to `parts`."""
        self._checkpoint = checkpoint
        self._specs = {spec.name: spec for spec in specs}
        self._quantizer = quantizer
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._seen = seen
        self._parts = parts
        self._total = sum(checkpoint.tensors[name].nbytes for name in self._specs)
        self._names: list[str] = []
        self.nbytes = 0
        self.read_bytes = 0

    def tensor(self, name: str) -> Tensor:
        def make() -> tuple[Tensor, int]:
            tensor = self._placed(name)
            return tensor, tensor.nbytes

        return self._part(("tensor", name), make)

    def linear(self, *modules: str) -> Linear:
        def make() -> tuple[Linear, int]:
            names = [f"{module}.weight" for module in modules]
            biases = [f"{module}.bias" for module in modules if f"{module}.bias" in self._specs]
            bias = self._stacked(biases) if biases else None
            packed = self._fused(self._as_kept(names), bias)
            return packed, packed.nbytes

        return self._part(("linear", *modules), make)

    def experts(self, *weights: Sequence[str], bias: str | Sequence[str] | None = None) -> GroupedLinear:
        def make() -> tuple[GroupedLinear, int]:
            named = [bias] if isinstance(bias, str) else bias or ()
            biases = torch.cat([self._read(name) for name in named], dim=1) if named else None
            parts = zip(*map(self._by_expert, weights), strict=True)
            shape = self._experts_shape(weights)
            packed: GroupedLinear
            if any(self._keeps(name) for names in weights for name in names):
                each = [None] * shape[0] if biases is None else biases
                packed = PackedExperts([self._fused(part, own) for part, own in zip(parts, each, strict=True)])
            else:
                fused = (_one(part) for part in parts)
                packed = pack_experts(fused, biases, shape, self._quantizer, dtype=self.dtype, device=self.device)
            return packed, packed.nbytes

        return self._part(("experts", *(name for names in weights for name in names)), make)

    def embedding(self, name: str) -> Embedding:
        def make() -> tuple[Embedding, int]:
            quantizer = embedding_quantizer(self._quantizer)
            if self._keeps(name):
                stored = self._read_stored(name)
                packed = cast("Embedding", quantizer.keep(stored, None, dtype=self.dtype, device=self.device))
            else:
                packed = quantizer.pack_embedding(self._read(name), dtype=self.dtype, device=self.device)
            return packed, packed.nbytes

        return self._part(("embedding", name), make)

    def made(self, names: Sequence[str], make: Callable[[Mapping[str, Tensor]], T]) -> T:
        def read() -> tuple[T, int]:
            tensors = {name: self._placed(name) for name in names}
            return make(tensors), sum(tensor.nbytes for tensor in tensors.values())

        return self._part(("made", *names), read)

    def _part(self, key: Key, make: Callable[[], tuple[T, int]]) -> T:
        part = self._parts.get(key) if self._parts is not None else None
        if part is None:
            first = len(self._names)
            part = Part(*make(), tuple(self._names[first:]))
            if self._parts is not None:
                self._parts[key] = part
        self.nbytes += part.nbytes
        value: Any = part.value
        return value  # type: ignore[no-any-return]

    def _placed(self, name: str) -> Tensor:
        dtype = torch.float32 if self._specs[name].fp32 else self.dtype
        return self._read(name).to(self.device, dtype)

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

    def _experts_shape(self, weights: Sequence[Sequence[str]]) -> tuple[int, int, int]:
        """[experts, out_features, in_features] of what is fused of `weights`."""
        shapes = [self._specs[names[0]].weight_shape for names in weights]
        *experts, _, columns = shapes[0]
        return math.prod(experts) * len(weights[0]), sum(shape[-2] for shape in shapes), columns

    def _by_expert(self, names: Sequence[str]) -> Iterator[Tensor | StoredWeight]:
        """Each expert's weight [out_features, in_features], read when it is asked for."""
        for name in names:
            if len(self._specs[name].shape) == 2:
                yield from self._as_kept([name])
                continue
            self._note(name)
            if self._keeps(name):
                yield from self._checkpoint.stored_slices(name)
            else:
                for weight in self._checkpoint.slices(name):
                    yield weight.t().contiguous() if self._specs[name].transposed else weight

    def _keeps(self, name: str) -> bool:
        """Whether the quantizer keeps the weight as it is stored."""
        form = self._checkpoint.tensors[name].form
        return form is not None and self._quantizer.keeps(form)

    def _as_kept(self, names: Sequence[str]) -> Sequence[Tensor | StoredWeight]:
        """The named weights, as they are stored where one of them is kept so, or else one below the other."""
        if not any(map(self._keeps, names)):
            weight = self._stacked(names)
            return [weight.t().contiguous() if self._specs[names[0]].transposed else weight]
        return [self._read_stored(name) if self._keeps(name) else self._read(name) for name in names]

    def _fused(self, weights: Sequence[Tensor | StoredWeight], bias: Tensor | None) -> Linear:
        pack = partial(self._quantizer.pack, dtype=self.dtype, device=self.device)
        keep = partial(self._quantizer.keep, dtype=self.dtype, device=self.device)
        return fuse(weights, bias, pack, keep)

    def _read_stored(self, name: str) -> StoredWeight:
        weight = self._checkpoint.stored(name)
        self._note(name)
        return weight

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(self._specs[name].name)
        self._note(name)
        return tensor

    def _note(self, name: str) -> None:
        self._names.append(name)
        self.read_bytes += self._checkpoint.tensors[name].nbytes
        if self._seen is not None:
            self._seen(name)
        if self._progress is not None:
            self._progress(self.read_bytes, self._total)


def _one(weights: Sequence[Tensor | StoredWeight]) -> Tensor:
    """What is fused of weights none of which is kept as it is stored."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def embedding_quantizer(quantizer: Quantizer) -> Quantizer:
    """What packs an embedding where `quantizer` packs linear weights."""
    return quantizer if quantizer.packs_embeddings else Plain()
