"""Linear layers: their tensors, and the product that each computes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.interfaces.architecture import TensorSpec
from core.runtime.device import matmul_dtype


def linear_tensors(module: str, rows: int, columns: int, bias: bool = False) -> tuple[TensorSpec, ...]:
    """The weight of `module`, [rows, columns], and its bias where it has one."""
    weight = TensorSpec(f"{module}.weight", (rows, columns), packed=True)
    return (weight, TensorSpec(f"{module}.bias", (rows,))) if bias else (weight,)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] times weight [out_features, in_features] transposed, in the dtype that both have.

    Where a device's kernels for many rows are slow in that dtype, the product is computed in a wider one.
    """
    dtype = matmul_dtype(x.device, x.dtype, len(x))
    if dtype is x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None).to(x.dtype)
