"""`bf16`: weights lie in memory in bfloat16 and are multiplied in the compute dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from core import DType, Quantizer


class BF16Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class BF16(Quantizer):
    name = "bf16"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] * DType.BF16.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> BF16Linear:
        stored = weight.to(device, torch.bfloat16)
        return BF16Linear(stored, bias.to(device, dtype) if bias is not None else None)
