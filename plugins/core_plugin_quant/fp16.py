"""`fp16`: weights are not quantized, but stored in the compute dtype that the user chose (fp16, bf16 or fp32)."""

import torch
from torch import Tensor

from core import DType, Quantizer
from core.blocks import PlainLinear


class FP16(Quantizer):
    name = "fp16"
    tables = True

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> PlainLinear:
        return PlainLinear(weight.to(device, dtype), bias.to(device, dtype) if bias is not None else None)
