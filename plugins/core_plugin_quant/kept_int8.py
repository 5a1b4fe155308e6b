"""Integers of 8 bits: in groups, as GGUF's Q8_0, GPTQ and MLX store them, or with one scale per output channel.

The latter are what `int8` makes of a weight. Those in groups are held as two weights of 4 bits with the same scales, so
that two products of torch's kernel for 4 bits are one of 8: weight = (16 * (high - 8) + low - 8) * scale + 17 * zero.
"""

import torch
from torch import Tensor

from core import DType, Embedding, StoredForm, StoredWeight, Values
from core.blocks import Kernel, Kernels, Product, choose_kernels
from core_plugin_quant import int8
from core_plugin_quant.int4 import best_layout, dequantising, kernel_product
from core_plugin_quant.kept_int4 import SMALLEST_GROUP, group_of, scales_and_zeros
from core_plugin_quant.layout import Blocks, Layout
from core_plugin_quant.parts import parts_on

_MIDDLE = 128
"""Added to an int8, it makes a number from 0 to 255, whose high and low four bits are stored."""


class KeptInt8:
    def keeps(self, form: StoredForm) -> bool:
        return form.values is Values.INT8 and form.rows == 1 and group_of(form) >= SMALLEST_GROUP

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        rows, columns = shape
        scales = 1 if _is_per_channel(form, columns) else 2 * (columns // group_of(form))
        return rows * columns + rows * scales * dtype.itemsize

    def keep(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Embedding:
        rows, columns = weight.shape
        if _is_per_channel(weight.form, columns):
            values, scale = weight.values.to(device), (weight.scales[:, 0].float() * weight.factor).to(device, dtype)
            return int8.Int8Linear(values, scale, bias, int8.choose(values, scale))
        layout = best_layout(rows, group_of(weight.form), dtype, device)
        high, low = torch.empty(2, *layout.shape(rows, columns), dtype=torch.uint8, device=device)
        for part, values in parts_on(weight.values, device):
            both = values.to(torch.int16).add_(_MIDDLE).to(torch.uint8)
            layout.pack(both >> 4, high, part)
            layout.pack(both & 15, low, part)
        scale, zero = scales_and_zeros(weight, dtype, device).unbind(-1)
        scales = torch.stack((scale, (8 * scale.float() + zero.float()).div_(17).to(dtype)), dim=-1)
        return HalvesLinear(high, low, scales, bias, layout, choose(high, low, scales, layout))


def _is_per_channel(form: StoredForm, columns: int) -> bool:
    return form.columns == columns and not form.zeros


class HalvesLinear:
    """`high` and `low` in the order of `layout`; `scales` as in Int4Linear, for both of them."""

    def __init__(
        self,
        high: Tensor,
        low: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        layout: Layout,
        kernels: Kernels["HalvesLinear"],
    ) -> None:
        self.high = high
        self.low = low
        self.scales = scales
        self.bias = bias
        self.layout = layout
        self.kernels = kernels
        groups, self.out_features, _ = scales.shape
        self.in_features = 2 * high.numel() // self.out_features
        self.group = self.in_features // groups

    @property
    def nbytes(self) -> int:
        held = self.high.nbytes + self.low.nbytes + self.scales.nbytes
        return held + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.kernels(self, x)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        values = self.layout.rows(self.high, ids).float().mul_(16).add_(self.layout.rows(self.low, ids))
        scale, zero = self.scales[:, ids].float().permute(2, 1, 0).unsqueeze(-1)
        grouped = values.view(len(ids), -1, self.group).mul_(scale).add_(17 * zero - 136 * scale)
        return grouped.view(len(ids), -1).to(self.scales.dtype)

    def dequantise(self, part: slice) -> Tensor:
        """The rows `part` in float32, transposed, in blocks: [blocks, in_features, rows of a block]."""
        values = self.layout.unpack(self.high, part).float().mul_(16).add_(self.layout.unpack(self.low, part))
        blocks, _, rows = values.shape
        scale, zero = self.scales[:, part].float().view(-1, blocks, 1, rows, 2).permute(4, 1, 0, 2, 3).contiguous()
        grouped = values.view(blocks, -1, self.group, rows)
        torch.addcmul(17 * zero - 136 * scale, grouped, scale, out=grouped)
        return values


def choose(high: Tensor, low: Tensor, scales: Tensor, layout: Layout) -> Kernels[HalvesLinear]:
    """What multiplies with such a weight."""
    available = kernels(scales.device, scales.dtype, layout)
    groups, rows, _ = scales.shape
    columns = 2 * high.numel() // rows

    def sample(outputs: int) -> HalvesLinear:
        first, own = slice(len(high) * outputs // rows), scales[:, :outputs].contiguous()
        return HalvesLinear(high[first], low[first], own, None, layout, Kernels(available))

    product = Product(f"8 bits {layout}, groups of {columns // groups}", rows, columns, scales.dtype, scales.device)
    return choose_kernels(product, available, sample)


def kernels(device: torch.device, dtype: torch.dtype, layout: Layout) -> dict[str, Kernel[HalvesLinear]]:
    found: dict[str, Kernel[HalvesLinear]] = {**dequantising(device, dtype)}
    return {**found, "packed": _multiply_packed} if isinstance(layout, Blocks) else found


def _multiply_packed(linear: HalvesLinear, x: Tensor) -> Tensor:
    """By torch's kernel for 4 bits, twice."""
    shape = linear.out_features, linear.in_features // 2
    high, low = (kernel_product(x, half.view(shape), linear.group, linear.scales) for half in (linear.high, linear.low))
    return low.add_(high, alpha=16)
