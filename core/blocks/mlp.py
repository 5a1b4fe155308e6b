"""Feed-forward blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.interfaces.architecture import Weights


class GatedMLP:
    """SwiGLU (Shazeer 2020); gate and up come from one fused product."""

    def __init__(self, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}.mlp"
        self.gate_up = weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.down = weights.linear(f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
