"""Weights that are not quantized: held in the compute dtype, as fp16 does and as what is not to be packed stays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Linear, Quantizer, Table
from core.runtime.blocked import BlockedLinear, BlockedTable, blocked
from core.runtime.device import matmul_dtype

_PART_VALUES = 1 << 17


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] times weight [out_features, in_features] transposed, in the dtype that both have.

    Where a device's kernels for many rows are slow in that dtype, the product is computed in a wider one, part by
    part: what is converted stays in the processor's cache.
    """
    dtype = matmul_dtype(x.device, x.dtype, len(x))
    if dtype is x.dtype:
        return F.linear(x, weight, bias)
    wide, rows = x.to(dtype), max(1, _PART_VALUES // weight.shape[1])
    y = torch.cat([F.linear(wide, part.to(dtype)) for part in torch.split(weight, rows)], dim=1).to(x.dtype)
    return y if bias is None else y.add_(bias)


class PlainLinear:
    """A weight [out_features, in_features] in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Plain(Quantizer):
    """What embedding and head are held by where they are not to be quantized."""

    name = "plain"
    tables = True

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        weight, bias = weight.to(device, dtype), bias.to(device, dtype) if bias is not None else None
        reordered = blocked(weight)
        return PlainLinear(weight, bias) if reordered is None else BlockedLinear(reordered, bias)

    def pack_table(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> Table:
        weight = weight.to(device, dtype)
        return BlockedTable.of(weight) or PlainLinear(weight, None)
