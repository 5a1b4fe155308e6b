"""The linear layers of a mixture's experts: each expert's weight is packed by itself, as any quantizer packs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.quantizer import GroupedLinear, Linear, Quantizer
from core.runtime.kernel_choice import normal, timed
from core.runtime.unquantized import Plain, PlainLinear

_ALIGNMENT = 16
"""torch's kernel for all experts wants multiples of so many features."""


class PackedExperts:
    """One expert after another multiplies its rows."""

    def __init__(self, experts: Sequence[Linear]) -> None:
        self._experts = experts

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        stops = ends.tolist()
        rows = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        experts = [expert for expert, count in zip(self._experts, rows, strict=True) if count]
        parts = torch.split_with_sizes(x, [count for count in rows if count])
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    def each(self, x: Tensor, experts: Sequence[int]) -> Tensor:
        rows = [x] * len(experts) if len(x) == 1 else torch.split(x, 1)
        return torch.cat([self._experts[expert](row) for expert, row in zip(experts, rows, strict=True)])


class StackedExperts:
    """All experts multiply at once: weight [experts, out_features, in_features] in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = F.grouped_mm(x, self.weight.mT, offs=ends.to(torch.int32))
        if self.bias is None:
            return y
        return y.add_(self.bias[torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True)])

    def each(self, x: Tensor, experts: Sequence[int]) -> Tensor:
        y = (self.weight[experts] @ x.expand(len(experts), -1)[..., None])[..., 0]
        return y if self.bias is None else y.add_(self.bias[experts])


def pack_experts(
    weights: Iterable[Tensor],
    bias: Tensor | None,
    shape: tuple[int, int, int],
    quantizer: Quantizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> GroupedLinear:
    """Packs the `weights` of `shape` [experts, out_features, in_features], each before the next one is asked for.

    `bias` is [experts, out_features].
    """
    if type(quantizer).pack is Plain.pack and _stacks(device, dtype, shape):
        stacked = torch.empty(shape, dtype=dtype, device=device)
        for expert, weight in enumerate(weights):
            stacked[expert] = weight
        return StackedExperts(stacked, bias.to(device, dtype) if bias is not None else None)
    biases = [None] * shape[0] if bias is None else bias
    pack = partial(quantizer.pack, dtype=dtype, device=device)
    return PackedExperts([pack(weight, own) for weight, own in zip(weights, biases, strict=True)])


def _stacks(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
    """Whether all experts can multiply at once. On a CPU each does so faster by the kernel that is chosen for it."""
    aligned = all(features % _ALIGNMENT == 0 for features in shape[1:])
    return device.type != "cpu" and aligned and stacking_works(device, dtype)


@cache
def stacking_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel for all experts is there, and right."""
    weight, x = normal(4 * 64, 64, dtype, device).view(4, 64, 64), normal(24, 64, dtype, device)
    ends = torch.tensor([8, 8, 20, 24], device=device)
    each, all_ = PackedExperts([PlainLinear(own, None) for own in weight]), StackedExperts(weight, None)
    return "stacked" in timed({"each": partial(each, x, ends), "stacked": partial(all_, x, ends)})
