"""`int4`: groups of columns have a scale and a zero point each: weight = (value - 8) * scale + zero, values 0 to 15.

What is stored for a weight [out_features, in_features]:

- values, two per byte, in the order of a layout (see `layout`);
- scale and zero point of each group, [in_features / group, out_features, 2], in the compute dtype.
"""

import math
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from core import ConfigError, DType, Quantizer
from core.blocks import Kernel, Kernels, Product, choose_kernels, normal, timed
from core_plugin_quant.layout import Blocks, Layout, Rows
from core_plugin_quant.parts import dequantised_parts, quantised_parts
from core_plugin_quant.report import describe, wide_dtypes

GROUPS = (128, 64, 32, 16)
NARROW = 2048
"""Input features below which groups are of 32 at most: small models suffer most from larger ones."""
_KERNEL_LAYOUTS = {"cpu": (Blocks(64), Blocks(32))}
"""By device, the orders that torch's kernels may want: on a CPU that with AVX-512 and that with AVX2."""


class Dequantised(Protocol):
    """What can be multiplied with by dequantising it part by part."""

    out_features: int
    in_features: int

    def dequantise(self, part: slice) -> Tensor:
        """The rows `part` in float32, transposed, in blocks: [blocks, in_features, rows of a block]."""


class Int4Linear:
    """`values` in the order of `layout`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: Tensor | None, layout: Layout, kernels: Kernels["Int4Linear"]
    ) -> None:
        self.values = values
        self.scales = scales
        self.bias = bias
        self.layout = layout
        self.kernels = kernels
        groups, self.out_features, _ = scales.shape
        self.in_features = 2 * values.numel() // self.out_features
        self.group = self.in_features // groups

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernels(self, x)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        values = self.layout.rows(self.values, ids).float().view(len(ids), -1, self.group)
        scale, zero = self.scales[:, ids].float().permute(2, 1, 0).unsqueeze(-1)
        return values.mul_(scale).add_(zero - 8 * scale).view(len(ids), -1).to(self.scales.dtype)

    def dequantise(self, part: slice) -> Tensor:
        """The rows `part` in float32, transposed, in blocks: [blocks, in_features, rows of a block]."""
        values = self.layout.unpack(self.values, part).float()
        blocks, _, rows = values.shape
        scale, zero = self.scales[:, part].float().view(-1, blocks, 1, rows, 2).permute(4, 1, 0, 2, 3).contiguous()
        grouped = values.view(blocks, -1, self.group, rows)
        torch.addcmul(torch.sub(zero, scale, alpha=8), grouped, scale, out=grouped)
        return values


class Int4(Quantizer):
    name = "int4"
    packs_embeddings = True
    quality = "perplexity +8% on a model of 135M parameters; larger ones lose less"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return held_bytes(shape, group_size(shape[1]), dtype)

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Int4Linear:
        rows, columns = weight.shape
        group = group_size(columns)
        layout = best_layout(rows, group, dtype, device)
        values = torch.empty(layout.shape(rows, columns), dtype=torch.uint8, device=device)
        scales = torch.empty(columns // group, rows, 2, dtype=dtype, device=device)
        for part, wide in quantised_parts(weight, device):
            quantised, scales[:, part] = quantise(wide, group, dtype)
            layout.pack(quantised, values, part)
        kernels = choose(values, scales, layout)
        return Int4Linear(values, scales, bias.to(device, dtype) if bias is not None else None, layout, kernels)

    def report(self, device: torch.device) -> str:
        return describe(self, device)


def held_bytes(shape: tuple[int, int], group: int, dtype: DType) -> int:
    rows, columns = shape
    return rows * columns // 2 + rows * (columns // group) * 2 * dtype.itemsize


def best_layout(rows: int, group: int, dtype: torch.dtype, device: torch.device) -> Layout:
    wanted = kernel_layout(device, dtype, group)
    return wanted if wanted is not None and rows % wanted.block == 0 else Rows()


def choose(values: Tensor, scales: Tensor, layout: Layout) -> Kernels[Int4Linear]:
    """What multiplies with such a weight."""
    available = kernels(scales.device, scales.dtype, layout)
    groups, rows, _ = scales.shape
    columns = 2 * values.numel() // rows

    def sample(outputs: int) -> Int4Linear:
        first = values[: len(values) * outputs // rows]
        return Int4Linear(first, scales[:, :outputs].contiguous(), None, layout, Kernels(available))

    product = Product(f"int4 {layout}, groups of {columns // groups}", rows, columns, scales.dtype, scales.device)
    return choose_kernels(product, available, sample)


def dequantising(device: torch.device, dtype: torch.dtype) -> dict[str, Kernel[Dequantised]]:
    wides = wide_dtypes(device, dtype).items()
    return {f"dequantised to {name}": partial(multiply_dequantised, wide=wide) for name, wide in wides}


def kernels(device: torch.device, dtype: torch.dtype, layout: Layout) -> dict[str, Kernel[Int4Linear]]:
    found: dict[str, Kernel[Int4Linear]] = {**dequantising(device, dtype)}
    return {**found, "packed": multiply_packed} if isinstance(layout, Blocks) else found


def multiply_packed(linear: Int4Linear, x: Tensor) -> Tensor:
    """By torch's kernel, which reads values that lie in blocks."""
    packed = linear.values.view(linear.out_features, linear.in_features // 2)
    return kernel_product(x, packed, linear.group, linear.scales)


def kernel_product(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """By torch's kernel: packed [out_features, in_features / 2], scales as in Int4Linear."""
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)
    return y


def multiply_dequantised(linear: "Dequantised", x: Tensor, wide: torch.dtype) -> Tensor:
    """In the dtype `wide`."""
    given, y = x.to(wide), x.new_empty(len(x), linear.out_features)
    for part in dequantised_parts(linear.out_features, linear.in_features, x.device):
        values = linear.dequantise(part)
        if wide is torch.float32:
            y[:, part] = torch.matmul(given, values).transpose(0, 1).flatten(1)
        else:
            y[:, part] = given @ values.to(wide).transpose(0, 1).flatten(1)
    return y


def group_size(columns: int) -> int:
    """The largest of `GROUPS` that suits and divides `columns`. Raises ConfigError where none does."""
    for group in GROUPS:
        if columns % group == 0 and (group <= 32 or columns >= NARROW):
            return group
    raise ConfigError(
        f"int4 can't pack a weight with {columns} input features",
        f"it packs them in groups of {', '.join(map(str, GROUPS))}, and none of these divides them",
        "use --quant int8",
    )


def quantise(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 [rows, columns] -> values uint8 [rows, columns], scales and zeros [columns / group, rows, 2] in `dtype`.

    Values are found with the scale and zero point as they are stored, so that their rounding adds no error.
    """
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.aminmax(dim=-1)
    scale = ((high - low) / 15).to(dtype).float()
    zero = (low + 8 * scale).to(dtype).float()
    steps = (grouped - zero[..., None]) / scale.where(scale > 0, 1)[..., None]
    values = steps.round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return values.view(weight.shape), torch.stack((scale.t(), zero.t()), dim=-1).to(dtype)


@cache
def kernel_layout(device: torch.device, dtype: torch.dtype, group: int) -> Blocks | None:
    """The layout that torch's int4 kernel wants, where it is fast in `dtype` on `device`; None where it isn't."""
    quantised, scales = quantise(normal(1024, 1024, torch.float32, device), group, dtype)
    x = normal(1, 1024, dtype, device)
    for layout in _KERNEL_LAYOUTS.get(device.type, ()):
        values = torch.empty(layout.shape(1024, 1024), dtype=torch.uint8, device=device)
        layout.pack(quantised, values, slice(0, 1024))
        linear = Int4Linear(values, scales, None, layout, Kernels({"packed": multiply_packed}))
        portable = partial(multiply_dequantised, linear, x, wide=torch.float32)
        times = timed({"portable": portable, "packed": partial(multiply_packed, linear, x)})
        if times.get("packed", math.inf) < times["portable"]:
            return layout
    return None
