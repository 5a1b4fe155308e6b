"""Weights that are not quantized: held in the compute dtype, as fp16 does and as what is not to be packed stays.

On a CPU a weight lies in the order that is found to be fastest: row by row, column by column, or oneDNN's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Embedding, Linear, Quantizer
from core.runtime.device import matmul_dtype, torch_dtype
from core.runtime.kernel_choice import CHOOSER, Kernel, Kernels, Product, normal
from core.runtime.onednn_weights import BlockedEmbedding, BlockedLinear, reorder, reordered, works

_PART_VALUES = 1 << 18
_PART_ROWS, _PART_COLUMNS = 1024, 128
_MIN_BYTES = 1 << 19
"""A smaller weight is read in less time than another order costs."""
_MUCH = 1.25
"""One row is to take less than so many times what it takes in the best order."""
_SESSIONS = 8
"""The rows of a step of several sessions, for which the order is chosen."""
_WORTH = 1.1
"""An order that has to be made is to be faster by so much than the one that is there."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] times weight [out_features, in_features] transposed, in the dtype that both have.

    Where a device's kernels for many rows are slow in that dtype, the product is computed in a wider one.
    """
    wider = matmul_dtype(x.device, x.dtype, len(x)) is not x.dtype
    return multiply_wide(x, weight, bias) if wider else F.linear(x, weight, bias)


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `multiply`, in float32, part by part: what is converted stays in the processor's cache."""
    wide, rows = x.float(), max(1, _PART_VALUES // weight.shape[1])
    y = torch.cat([F.linear(wide, part.float()) for part in torch.split(weight, rows)], dim=1).to(x.dtype)
    return y if bias is None else y.add_(bias)


def multiply_wide_by_columns(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `multiply_wide`, of a weight in memory column by column: converted are long pieces of a few columns."""
    wide, columns = x.float(), torch.split(weight.t(), _PART_COLUMNS)
    y = x.new_empty(len(x), len(weight))
    for start in range(0, len(weight), _PART_ROWS):
        part = slice(start, start + _PART_ROWS)
        added = wide.new_zeros(len(x), len(weight[part]))
        for piece, given in zip(columns, torch.split(wide, _PART_COLUMNS, dim=1), strict=True):
            added.addmm_(given, piece[:, part].float())
        y[:, part] = added
    return y if bias is None else y.add_(bias)


def _native(linear: PlainLinear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _wide(linear: PlainLinear, x: Tensor) -> Tensor:
    return multiply_wide(x, linear.weight, linear.bias)


def _wide_by_columns(linear: PlainLinear, x: Tensor) -> Tensor:
    return multiply_wide_by_columns(x, linear.weight, linear.bias)


class PlainLinear:
    """A weight [out_features, in_features] in the compute dtype, in any strides."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels[PlainLinear] | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._kernels = kernels or Kernels({"torch": _native})

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels(self, x)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Plain(Quantizer):
    """What embedding and head are held by where they are not to be quantized."""

    name = "plain"
    packs_embeddings = True

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        weight, bias = weight.to(device, dtype), bias.to(device, dtype) if bias is not None else None
        for order, kernels in orders(weight):
            if order != _BLOCKED:
                return PlainLinear(_lay(weight, order), bias, kernels)
            if (blocked := reordered(weight)) is not None:
                return BlockedLinear(blocked, bias)
        return PlainLinear(weight, bias)

    def pack_embedding(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> Embedding:
        weight = weight.to(device, dtype)
        for order, kernels in orders(weight):
            if order != _BLOCKED:
                return PlainLinear(_lay(weight, order), None, kernels)
            if (embedding := BlockedEmbedding.of(weight)) is not None:
                return embedding
        return PlainLinear(weight, None)

    def report(self, device: torch.device) -> str:
        said = []
        for dtype in DType:
            _, kernels = orders(normal(1024, 1024, torch_dtype(dtype), device))[0]
            said.append(f"{dtype}: {kernels.summary()}")
        return "; ".join(said)


_ROWS, _COLUMNS, _BLOCKED = "by rows", "by columns", "oneDNN's"
_Sample = Mapping[str, Any]
"""The first rows of a weight as a linear layer, by the order they lie in."""


def orders(weight: Tensor) -> list[tuple[str, Kernels[PlainLinear]]]:
    """How a weight like this one may lie in memory, the best first, and what multiplies with it then."""
    if weight.device.type != "cpu":
        return [(_ROWS, Kernels({"torch": _native}))]
    kernels = _kernels(weight)
    tried = {name: partial(_try, kernel, order) for order, each in kernels.items() for name, kernel in each.items()}
    product = Product("dense", len(weight), weight.shape[1], weight.dtype, weight.device)
    times = CHOOSER.choose(product, tried, partial(_sample, weight, list(kernels))).times
    found = [(order, Kernels(each, times)) for order, each in kernels.items()]
    fastest = min(times[1].values())

    def slowness(found: tuple[str, Kernels[PlainLinear]]) -> tuple[bool, float]:
        """A step of several sessions decides, if that of one is not held up much."""
        order, kernels = found
        return kernels.seconds(1) > _MUCH * fastest, kernels.seconds(_SESSIONS) * _cost(order)

    found.sort(key=slowness)
    CHOOSER.note(product, found[0][1])
    return found


def _cost(order: str) -> float:
    return 1.0 if order == _ROWS else _WORTH


def _kernels(weight: Tensor) -> dict[str, dict[str, Kernel[Any]]]:
    """By order."""
    wide = weight.dtype is not torch.float32
    by_rows: dict[str, Kernel[Any]] = {"torch": _native, **({"torch in fp32": _wide} if wide else {})}
    if weight.nbytes < _MIN_BYTES:
        return {_ROWS: by_rows}
    by_columns: dict[str, Kernel[Any]] = {
        "torch by columns": _native,
        **({"torch in fp32 by columns": _wide_by_columns} if wide else {}),
    }
    blocked: dict[str, Kernel[Any]] = {"oneDNN": BlockedLinear.__call__}
    return {_ROWS: by_rows, _COLUMNS: by_columns, **({_BLOCKED: blocked} if works(weight.dtype) else {})}


def _try(kernel: Kernel[Any], order: str, sample: _Sample, x: Tensor) -> Tensor:
    return kernel(sample[order], x)


def _sample(weight: Tensor, orders: Sequence[str], outputs: int) -> _Sample:
    first = weight[:outputs]
    return {
        order: BlockedLinear(reorder(first), None) if order == _BLOCKED else PlainLinear(_lay(first, order), None)
        for order in orders
    }


def _lay(weight: Tensor, order: str) -> Tensor:
    return weight.t().contiguous().t() if order == _COLUMNS else weight
