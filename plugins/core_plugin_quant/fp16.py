"""`fp16`: weights are not quantized, but stored in the compute dtype that the user chose (fp16, bf16 or fp32)."""

import torch
from torch import Tensor

from core import DType, Quantizer
from core.blocks import multiply


class PlainLinear:
    """A matrix product with a weight [out_features, in_features] in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


class FP16(Quantizer):
    name = "fp16"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> PlainLinear:
        return PlainLinear(weight.to(device, dtype), bias.to(device, dtype) if bias is not None else None)
