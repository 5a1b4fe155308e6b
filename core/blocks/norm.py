"""Normalization."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """Root mean square layer normalization (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] of any floating dtype -> the same shape in the weight's dtype."""
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(self.weight.dtype)
