"""Weights a part at a time: neither what is packed nor what is dequantised is ever held as a whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

ALIGNMENT = 64
"""Rows that lie together in every layout: parts are multiples of it."""

_PACKED_AT_ONCE = {"cpu": 1 << 17}
_PACKED_AT_ONCE_ON_OTHERS = 1 << 20
"""Values: on a CPU what fits its cache in float32, and is no block that the system has to give anew each time."""

_PART = {"cpu": 1 << 18}
_PART_ON_OTHERS = 1 << 25
"""Values in a part: what a CPU's cache holds in float32, and what keeps a GPU busy."""


def parts(rows: int, columns: int, values: int) -> Iterator[slice]:
    """Slices of about so many values each, over `rows`."""
    step = max(1, values // (columns * ALIGNMENT)) * ALIGNMENT
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def dequantised_parts(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Which rows of a weight to dequantise at once."""
    return parts(rows, columns, _PART.get(device.type, _PART_ON_OTHERS))


def parts_on(weight: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """The weight on `device`, a few rows at a time, so that packing holds little beside what it packs."""
    values = _PACKED_AT_ONCE.get(device.type, _PACKED_AT_ONCE_ON_OTHERS)
    for part in parts(len(weight), weight.shape[1], values):
        yield part, weight[part].to(device)


def quantised_parts(weight: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """As `parts_on`, in float32."""
    for part, values in parts_on(weight, device):
        yield part, values.float()
