"""Small floats: MXFP4 and NVFP4 (E2M1), bitsandbytes' NF4 and FP4, FP8 (E4M3, E5M2), with scales as stored."""

import ctypes
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from core import DType, StoredForm, StoredWeight, Values
from core.blocks import Kernel, Kernels, Product, choose_kernels, dequantise, number_table
from core_plugin_quant.native import library
from core_plugin_quant.parts import dequantised_parts
from core_plugin_quant.report import wide_dtypes

_FLOATS = (Values.E2M1, Values.NF4, Values.FP4, Values.E4M3, Values.E5M2)


class KeptFloats:
    def keeps(self, form: StoredForm) -> bool:
        return form.values in _FLOATS and not form.zeros

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        down, across = form.blocks(shape)
        return shape[0] * shape[1] * form.values.bits // 8 + down * across * form.scale_bytes

    def keep(
        self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> "FloatLinear":
        placed = replace(
            weight, values=weight.values.contiguous().to(device), scales=weight.scales.contiguous().to(device)
        )
        return FloatLinear(placed, dtype, bias, choose(placed, dtype))


class FloatLinear:
    """Computes in `dtype` with `weight`, as it is stored."""

    def __init__(
        self, weight: StoredWeight, dtype: torch.dtype, bias: Tensor | None, kernels: Kernels["FloatLinear"]
    ) -> None:
        self.weight = weight
        self.dtype = dtype
        self.bias = bias
        self.kernels = kernels

    @property
    def nbytes(self) -> int:
        held = self.weight.values.nbytes + self.weight.scales.nbytes
        return held + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernels(self, x)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        weight, form = self.weight, replace(self.weight.form, rows=1)
        own = replace(weight, form=form, values=weight.values[ids], scales=weight.scales[ids // weight.form.rows])
        return dequantise(own).to(self.dtype)


def choose(weight: StoredWeight, dtype: torch.dtype) -> Kernels[FloatLinear]:
    """What multiplies with such a weight."""
    device, form = weight.values.device, weight.form
    available = kernels(weight, dtype)

    def sample(outputs: int) -> FloatLinear:
        first = replace(weight, values=weight.values[:outputs], scales=weight.scales[: -(-outputs // form.rows)])
        return FloatLinear(first, dtype, None, Kernels(available))

    operation = f"{form.values} in blocks of {form.rows}x{form.columns}"
    return choose_kernels(Product(operation, *weight.shape, dtype, device), available, sample)


def kernels(weight: StoredWeight, dtype: torch.dtype) -> dict[str, Kernel[FloatLinear]]:
    wides = wide_dtypes(weight.values.device, dtype).items()
    found: dict[str, Kernel[FloatLinear]] = {
        f"dequantised to {name}": partial(_multiply_dequantised, wide=wide) for name, wide in wides
    }
    native = _native(weight)
    return {**found, "native": native} if native is not None and library() is not None else found


def _multiply_dequantised(linear: FloatLinear, x: Tensor, wide: torch.dtype) -> Tensor:
    rows, columns = linear.weight.shape
    given, y = x.to(wide), x.new_empty(len(x), rows)
    for part in dequantised_parts(rows, columns, x.device):
        y[:, part] = given @ dequantise(linear.weight, part).to(wide).t()
    return y


def _native(weight: StoredWeight) -> Kernel[FloatLinear] | None:
    form, columns = weight.form, weight.shape[1]
    if weight.values.device.type != "cpu":
        return None
    if form.values.bits == 8:
        return _multiply_bytes if form.columns % 16 == 0 and columns % form.columns == 0 else None
    in_blocks = form.rows == 1 and (form.columns == 16 or form.columns % 32 == 0)
    return _multiply_halves if in_blocks and columns % max(form.columns, 32) == 0 else None


def _multiply_halves(linear: FloatLinear, x: Tensor) -> Tensor:
    """Two values in a byte."""
    weight, wide = linear.weight, x.float()
    even, odd = wide[:, ::2].contiguous(), wide[:, 1::2].contiguous()
    scales, table = weight.scales, None
    if scales.itemsize > 1:
        scales = scales.float().mul(weight.factor)
    else:
        table = _scale_table(scales.dtype, weight.factor)
    y = torch.empty(len(x), weight.shape[0])
    sizes = (len(x), *weight.shape, weight.form.columns // 2)
    _call("small_floats", weight.values, scales, even, odd, y, *sizes, number_table(weight.form.values), table)
    return y.to(x.dtype)


def _multiply_bytes(linear: FloatLinear, x: Tensor) -> Tensor:
    weight, wide = linear.weight, x.float().contiguous()
    scales, y = weight.scales.float() * weight.factor, torch.empty(len(x), weight.shape[0])
    sizes = (len(x), *weight.shape, weight.form.rows, weight.form.columns, int(weight.form.values is Values.E4M3))
    _call("byte_floats", weight.values, scales, wide, y, *sizes)
    return y.to(x.dtype)


def _call(name: str, *given: Tensor | int | None) -> None:
    """A kernel with contiguous tensors, which may be absent, and sizes."""
    kernels = library()
    assert kernels is not None, "its kernel was chosen"
    getattr(kernels, name)(*map(_as_argument, given))


def _as_argument(given: Tensor | int | None) -> ctypes.c_void_p | ctypes.c_long:
    if isinstance(given, int):
        return ctypes.c_long(given)
    return ctypes.c_void_p(given.data_ptr() if given is not None else None)


@lru_cache(maxsize=256)
def _scale_table(dtype: torch.dtype, factor: float) -> Tensor:
    """What each byte stands for as a scale, in float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().mul_(factor)
