"""Normalization."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """Root mean square layer normalization (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] of any floating dtype -> the same shape in the weight's dtype."""
        return self.weight * self._normalized(x).to(self.dtype)

    def _normalized(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """An RMSNorm whose weight says how far from 1 it scales, as in Gemma; the product is in float32 too."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self.weight = 1 + weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        return (self.weight * self._normalized(x)).to(self.dtype)
