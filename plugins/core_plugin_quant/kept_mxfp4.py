"""MXFP4, as gpt-oss is published: blocks of 32 floats of 4 bits (E2M1) share a power of two (OCP MX, version 1.0).

Twice such a float is a whole number, 0, 1, 2, 3, 4, 6, 8 or 12 with a sign: the sum of two whole numbers of 4 bits. The
first is held, the second follows from it. So two products of torch's kernel for 4 bits are one of these floats.
"""

from functools import cache

import torch
from torch import Tensor

from core import DType, Embedding, StoredForm, StoredWeight, Values
from core.blocks import Kernel, Kernels, Product, choose_kernels, nibbles
from core_plugin_quant.int4 import dequantising, kernel_layout, kernel_product
from core_plugin_quant.kept_floats import KeptFloats
from core_plugin_quant.layout import Blocks
from core_plugin_quant.parts import parts, parts_on

BLOCK = 32
_FORM = StoredForm(Values.E2M1, BLOCK, scale_bytes=1)
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the floats of E2M1, by their places; from place 8 on they are negative."""
_BIAS = 128
"""Of the power of two that whole numbers are scaled by: 127, and 1 for twice the float."""
_AT_ONCE = 1 << 20
"""Values whose second numbers are made at once: both fit a CPU's cache."""


class KeptMXFP4:
    def keeps(self, form: StoredForm) -> bool:
        return form == _FORM

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        return shape[0] * shape[1] // 2 + shape[0] * shape[1] // BLOCK

    def keep(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Embedding:
        """fp16 has too few powers of two. Where there is no kernel, the floats are held in their own order."""
        layout = kernel_layout(device, dtype, BLOCK) if dtype is not torch.float16 else None
        if layout is None or weight.shape[0] % layout.block or weight.scales.dtype is not torch.float8_e8m0fnu:
            return KeptFloats().keep(weight, bias, dtype, device)
        values = torch.empty(layout.shape(*weight.shape), dtype=torch.uint8, device=device)
        for part, packed in parts_on(weight.values, device):
            first = _first_numbers(device).index_select(0, nibbles(packed).flatten().int())
            layout.pack(first.view(len(packed), -1), values, part)
        exponents = weight.scales.view(torch.uint8).t().contiguous().to(device)
        return MXFP4Linear(values, exponents, bias, layout, dtype, choose(values, exponents, layout, dtype))


class MXFP4Linear:
    """`values`: the first numbers, 8 added, in the order of `layout`; `exponents`: uint8 [blocks, out_features]."""

    def __init__(
        self,
        values: Tensor,
        exponents: Tensor,
        bias: Tensor | None,
        layout: Blocks,
        dtype: torch.dtype,
        kernels: Kernels["MXFP4Linear"],
    ) -> None:
        self.values = values
        self.exponents = exponents
        self.bias = bias
        self.layout = layout
        self.dtype = dtype
        self.kernels = kernels
        blocks, self.out_features = exponents.shape
        self.in_features = BLOCK * blocks

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.exponents.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernels(self, x)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        whole = _whole_numbers(self.layout.rows(self.values, ids)).view(len(ids), -1, BLOCK)
        return whole.mul_(_powers(self.exponents[:, ids]).t().unsqueeze(-1)).view(len(ids), -1).to(self.dtype)

    def dequantise(self, part: slice) -> Tensor:
        """The rows `part` in float32, transposed, in blocks: [blocks, in_features, rows of a block]."""
        values = _whole_numbers(self.layout.unpack(self.values, part))
        blocks, _, rows = values.shape
        scale = _powers(self.exponents[:, part]).view(-1, blocks, 1, rows).transpose(0, 1)
        values.view(blocks, -1, BLOCK, rows).mul_(scale)
        return values


def choose(values: Tensor, exponents: Tensor, layout: Blocks, dtype: torch.dtype) -> Kernels[MXFP4Linear]:
    """What multiplies with such a weight."""
    available = kernels(values.device, dtype)
    blocks, rows = exponents.shape

    def sample(outputs: int) -> MXFP4Linear:
        first = values[: len(values) * outputs // rows]
        return MXFP4Linear(first, exponents[:, :outputs], None, layout, dtype, Kernels(available))

    return choose_kernels(Product(f"mxfp4 {layout}", rows, BLOCK * blocks, dtype, values.device), available, sample)


def kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Kernel[MXFP4Linear]]:
    return {**dequantising(device, dtype), "as two products": _multiply_twice}


def _multiply_twice(linear: MXFP4Linear, x: Tensor) -> Tensor:
    """By torch's kernel for 4 bits."""
    block, columns = linear.layout.block, linear.in_features
    second, y = _second_numbers(x.device), x.new_empty(len(x), linear.out_features)
    for part in parts(linear.out_features, columns, _AT_ONCE):
        first = linear.values[part.start // block : part.stop // block].view(-1, columns // 2)
        places = first.view(torch.uint16).int().view(-1)
        rest = second.index_select(0, places).view(torch.uint8).view(first.shape)
        scales = _scales(linear.exponents[:, part], linear.dtype)
        torch.add(kernel_product(x, first, BLOCK, scales), kernel_product(x, rest, BLOCK, scales), out=y[:, part])
    return y


def _scales(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """[blocks, rows, 2], as the kernel wants them: the power of two, and a zero point of 0."""
    return (
        _pairs(dtype, exponents.device).index_select(0, exponents.flatten().int()).view(dtype).view(*exponents.shape, 2)
    )


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scale and the zero point of each exponent, as one integer."""
    scale = _powers(torch.arange(256, device=device)).to(dtype)
    word = torch.int32 if dtype is torch.bfloat16 else torch.int64
    return torch.stack((scale, torch.zeros_like(scale)), dim=-1).view(word).squeeze(1)


def _powers(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.float() - _BIAS)


def _whole_numbers(first: Tensor) -> Tensor:
    """What the stored ones stand for, float32: less 8, those from 5 on grow by 1, 2 and 5."""
    number = first.float().sub_(8)
    return number.mul(4).sub_(number.clamp(-4, 4)).sub_(number.clamp(-6, 6), alpha=2)


@cache
def _first_numbers(device: torch.device) -> Tensor:
    """By the place of a float in E2M1, 8 added."""
    return torch.tensor([8 + place for place in range(8)] + [8 - place for place in range(8)]).to(device, torch.uint8)


@cache
def _second_numbers(device: torch.device) -> Tensor:
    """By four of the first numbers in 16 bits, the four second ones, 8 added."""
    more = [twice - place for place, twice in enumerate(_TWICE)]
    second = torch.tensor([8, *(8 - each for each in more[:0:-1]), *(8 + each for each in more)])
    four = torch.arange(1 << 16)
    words = sum((second[four >> shift & 15] << shift for shift in (0, 4, 8, 12)), torch.zeros_like(four))
    return words.to(device, torch.int32).to(torch.int16)
