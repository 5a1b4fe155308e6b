"""Weights that several tensors of a file make together: integers or small floats, and their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core import CheckpointError, StoredForm, StoredWeight, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, TensorInfo]
Unpack = Callable[[StoredForm, Sequence["Tensor"]], StoredWeight]
"""Makes the weight of what `Packed.parts` are read as."""
SCALE_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class Packed:
    """`info` is the weight's own, as the checkpoint says it: where its values lie, which are the first of `parts`.

    Of a weight of three dimensions all parts have as many slices along the first one. `transposed` says that others
    expect each slice as [in_features, out_features].
    """

    info: TensorInfo
    form: StoredForm
    parts: tuple[str, ...]
    unpack: Unpack
    transposed: bool = False


def packed(
    values: TensorInfo, shape: tuple[int, ...], form: StoredForm, parts: Iterable[str], unpack: Unpack, kind: str
) -> Packed:
    """`values` are the stored ones, `shape` is that of the weight."""
    info = TensorInfo(shape, kind, values.nbytes, values.file, values.offset, form.values.bits, form)
    return Packed(info, form, tuple(parts), unpack)


def stems(tensors: Tensors, suffix: str) -> list[str]:
    """The names of modules that have a tensor with this suffix."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def part(tensors: Tensors, name: str, dtypes: Iterable[str], *dimensions: int | None) -> TensorInfo:
    """The named tensor, which has these dimensions, of which None may be any. Raises CheckpointError if it has not."""
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name!r}", "a quantized weight needs it")
    fits = len(info.shape) == len(dimensions) and all(
        wanted is None or wanted == given for wanted, given in zip(dimensions, info.shape, strict=True)
    )
    if not fits or info.dtype not in dtypes:
        raise CheckpointError(
            f"the tensor {name!r} in {info.file} is {info.dtype} {list(info.shape)}",
            f"a quantized weight needs it as {' or '.join(dtypes)} {[size or 'any' for size in dimensions]}",
            "config.json belongs to another model",
        )
    return info


def group_size(name: str, columns: int, groups: int) -> int:
    """Raises CheckpointError where so many columns can't be in groups of equal size."""
    if groups < 1 or columns % groups:
        raise CheckpointError(f"{name} has {groups} groups for {columns} columns", hint="the file is damaged")
    return columns // groups
