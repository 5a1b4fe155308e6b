"""`int8`: one scale per output channel, symmetric: weight = value * scale, with values from -127 to 127."""

from functools import cache

import torch
from torch import Tensor

from core import DType, Quantizer
from core_plugin_quant.parts import multiply_parts, quantised_parts, suits_kernel
from core_plugin_quant.probe import is_better, sample
from core_plugin_quant.report import describe

_KERNEL_COLUMNS = 32
"""The kernel reads so many columns at a time, and past the end where they don't come out even."""


class Int8Linear:
    """values: int8 [out_features, in_features]; scale: [out_features] in the compute dtype."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None, *, kernel: bool) -> None:
        self.values = values
        self.scale = scale
        self.bias = bias
        self.kernel = kernel

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel and suits_kernel(x):
            y = torch._weight_int8pack_mm(x, self.values, self.scale)
            return y if self.bias is None else y.add_(self.bias)
        rows, columns = self.values.shape
        return multiply_parts(x, (rows, columns), self._dequantise, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.values[ids] * self.scale[ids, None]

    def _dequantise(self, part: slice) -> Tensor:
        return self.values[part].float().mul_(self.scale[part, None]).t()[None]


class Int8(Quantizer):
    name = "int8"
    tables = True
    compute = DType.BF16

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        rows, columns = shape
        return rows * columns + rows * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Int8Linear:
        rows, columns = weight.shape
        kernel = columns % _KERNEL_COLUMNS == 0 and kernel_works(device, dtype)
        values = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scale = torch.empty(rows, dtype=dtype, device=device)
        for part, wide in quantised_parts(weight, device):
            scale[part] = wide.abs().amax(1) / 127
            step = scale[part, None].float()
            values[part] = (wide / step.where(step > 0, 1)).round_().clamp_(-127, 127)
        return Int8Linear(values, scale, bias.to(device, dtype) if bias is not None else None, kernel=kernel)

    def report(self, device: torch.device) -> str:
        return describe(lambda dtype: kernel_works(device, dtype))


@cache
def kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's int8 kernel is used for a few rows in `dtype` on `device`."""
    values = sample(1024, 1024, torch.float32, device).mul(40).round().clamp(-127, 127).to(torch.int8)
    scale = sample(1, 1024, dtype, device)[0].abs()
    x = sample(1, 1024, dtype, device)
    kernel = Int8Linear(values, scale, None, kernel=True)
    portable = Int8Linear(values, scale, None, kernel=False)
    return is_better(lambda: kernel(x), lambda: portable(x))
