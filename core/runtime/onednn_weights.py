"""Weights in the order in which oneDNN's kernels read them: on many x86 CPUs twice as fast as row by row."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_PART_VALUES = 1 << 20
_PART_ROWS = 64
"""An embedding's parts are of about so many values, and of a multiple of so many rows."""


class BlockedLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is one that `reordered` gave."""
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_blocked(x, self.weight, self.bias)


class BlockedEmbedding:
    """An embedding in `parts` of equally many rows, but for the last: one is unpacked where a row of it is wanted."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    @classmethod
    def of(cls, weight: Tensor) -> BlockedEmbedding | None:
        """None where that would take more memory."""
        step = max(1, _PART_VALUES // (weight.shape[1] * _PART_ROWS)) * _PART_ROWS
        parts = []
        for rows in torch.split(weight, step):
            part = reordered(rows)
            if part is None:
                return None
            parts.append(part)
        return cls(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([multiply_blocked(x, part) for part in self.parts], dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        part, inside = ids // len(self.parts[0]), ids % len(self.parts[0])
        found = torch.empty(len(ids), self.parts[0].shape[1], dtype=self.parts[0].dtype)
        for number in sorted(set(part.tolist())):
            wanted = part == number
            found[wanted] = self.parts[number].to_dense()[inside[wanted]]
        return found


def reordered(weight: Tensor) -> Tensor | None:
    """`weight` [out_features, in_features] in that order; None where it would take more memory."""
    result = reorder(weight)
    return result if torch.ops.mkldnn._nbytes(result) == weight.nbytes else None


def reorder(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return result


def multiply_blocked(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU has such kernels for `dtype`, and they are right."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(66, 64, generator=generator, dtype=torch.float32).to(dtype)
    weight, x = random[:64], random[64:]
    try:
        product = multiply_blocked(x, reorder(weight))
    # A kernel that isn't built, or doesn't know the dtype, says so in any of these ways.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(product, F.linear(x, weight), rtol=2e-2, atol=1e-1)
