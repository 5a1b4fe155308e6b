"""`int8`: one scale per output channel, symmetric: weight = value * scale, with values from -127 to 127."""

from functools import cache, partial

import torch
from torch import Tensor

from core import DType, Quantizer
from core.blocks import Kernel, Kernels, Product, choose_kernels, normal, timed
from core_plugin_quant.integers import integers_work, multiply_integers
from core_plugin_quant.parts import dequantised_parts, quantised_parts
from core_plugin_quant.report import describe, wide_dtypes

_KERNEL_COLUMNS = 32
"""The kernel reads so many columns at a time, and past the end where they don't come out even."""


class Int8Linear:
    """values: int8 [out_features, in_features]; scale: [out_features] in the compute dtype."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None, kernels: Kernels["Int8Linear"]) -> None:
        self.values = values
        self.scale = scale
        self.bias = bias
        self.kernels = kernels

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernels(self, x)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.values[ids] * self.scale[ids, None]


class Int8(Quantizer):
    name = "int8"
    packs_embeddings = True
    quality = "perplexity +0.8% on a model of 135M parameters"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        rows, columns = shape
        return rows * columns + rows * dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Int8Linear:
        rows, columns = weight.shape
        values = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scale = torch.empty(rows, dtype=dtype, device=device)
        for part, wide in quantised_parts(weight, device):
            scale[part] = wide.abs().amax(1) / 127
            step = scale[part, None].float()
            values[part] = (wide / step.where(step > 0, 1)).round_().clamp_(-127, 127)
        kernels = choose(values, scale)
        return Int8Linear(values, scale, bias.to(device, dtype) if bias is not None else None, kernels)

    def report(self, device: torch.device) -> str:
        return describe(self, device)


def choose(values: Tensor, scale: Tensor) -> Kernels[Int8Linear]:
    """What multiplies with such a weight."""
    available = kernels(scale.device, scale.dtype, values.shape[1])

    def sample(outputs: int) -> Int8Linear:
        return Int8Linear(values[:outputs], scale[:outputs], None, Kernels(available))

    return choose_kernels(Product("int8", len(scale), values.shape[1], scale.dtype, scale.device), available, sample)


def kernels(device: torch.device, dtype: torch.dtype, columns: int) -> dict[str, Kernel[Int8Linear]]:
    found: dict[str, Kernel[Int8Linear]] = {
        f"dequantised to {name}": partial(multiply_dequantised, wide=wide)
        for name, wide in wide_dtypes(device, dtype).items()
    }
    if columns % _KERNEL_COLUMNS == 0 and packed_works(device, dtype):
        found["packed"] = multiply_packed
    if dtype is not torch.float32 and integers_work(device):
        found["in integers"] = lambda linear, x: multiply_integers(x, linear.values, linear.scale)
    return found


def multiply_packed(linear: Int8Linear, x: Tensor) -> Tensor:
    """By torch's kernel."""
    return torch._weight_int8pack_mm(x, linear.values, linear.scale)


def multiply_dequantised(linear: Int8Linear, x: Tensor, wide: torch.dtype) -> Tensor:
    """In the dtype `wide`, in which products are scaled once they are added up; but fp16's range needs it before."""
    rows, columns = linear.values.shape
    given, y = x.to(wide), x.new_empty(len(x), rows)
    for part in dequantised_parts(rows, columns, x.device):
        values, scale = linear.values[part].to(wide), linear.scale[part].to(wide)
        if wide is torch.float16:
            y[:, part] = given @ values.mul_(scale[:, None]).t()
        else:
            y[:, part] = (given @ values.t()).mul_(scale)
    return y


@cache
def packed_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel is there, and right."""
    values = normal(1024, 1024, torch.float32, device).mul(40).round().clamp(-127, 127).to(torch.int8)
    scale, x = normal(1, 1024, dtype, device)[0].abs(), normal(1, 1024, dtype, device)
    linear = Int8Linear(values, scale, None, Kernels({"packed": multiply_packed}))
    portable = partial(multiply_dequantised, linear, x, wide=torch.float32)
    return "packed" in timed({"portable": portable, "packed": partial(multiply_packed, linear, x)})
