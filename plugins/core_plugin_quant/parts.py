"""Products with a weight that is dequantised a part at a time: the whole of it is never held."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from core.blocks import fast_dtype

ALIGNMENT = 64
"""Rows that lie together in every layout: parts are multiples of it."""

_PACKED_AT_ONCE = {"cpu": 1 << 17}
_PACKED_AT_ONCE_ON_OTHERS = 1 << 20
"""Values: on a CPU what fits its cache in float32, and is no block that the system has to give anew each time."""

_PART = {"cpu": 1 << 19}
_PART_ON_OTHERS = 1 << 25
"""Values in a part: what a CPU's cache holds, and what keeps a GPU busy."""


_KERNEL_ROWS = {"cpu": 128}
_KERNEL_ROWS_ON_OTHERS = 16


def suits_kernel(x: Tensor) -> bool:
    """Whether torch's kernels for packed weights are faster for these rows than dequantising once and multiplying."""
    return len(x) < _KERNEL_ROWS.get(x.device.type, _KERNEL_ROWS_ON_OTHERS)


def parts(rows: int, columns: int, values: int) -> Iterator[slice]:
    """Slices of about so many values each, over `rows`."""
    step = max(1, values // (columns * ALIGNMENT)) * ALIGNMENT
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def quantised_parts(weight: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """The weight in float32 on `device`, a few rows at a time, so that packing holds little beside what it packs."""
    values = _PACKED_AT_ONCE.get(device.type, _PACKED_AT_ONCE_ON_OTHERS)
    for part in parts(len(weight), weight.shape[1], values):
        yield part, weight[part].to(device).float()


def multiply_parts(
    x: Tensor, shape: tuple[int, int], dequantise: Callable[[slice], Tensor], bias: Tensor | None
) -> Tensor:
    """x [rows, in_features] times a weight of `shape` (out_features, in_features), transposed, in the dtype of x.

    `dequantise(part)` gives a part's rows in float32, transposed, in blocks: [blocks, in_features, rows of a block].
    """
    dtype = fast_dtype(x.device, x.dtype)
    wide = x.to(dtype)
    y = x.new_empty(len(x), shape[0])
    for part in parts(*shape, _PART.get(x.device.type, _PART_ON_OTHERS)):
        blocks = torch.matmul(wide, dequantise(part).to(dtype))
        y[:, part] = blocks.transpose(0, 1).reshape(len(x), -1)
    return y if bias is None else y.add_(bias)
