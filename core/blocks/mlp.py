"""Feed-forward blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.blocks.linear import linear_tensors
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import TensorSpec, Weights


class GatedMLP:
    """A gated linear unit (Shazeer 2020), whose tensors' names begin with `module`; gate and up come from one fused
    product."""

    def __init__(self, shape: DecoderShape, module: str, weights: Weights) -> None:
        gate_up = ("gate_up_proj",) if shape.fused_tensors else ("gate_proj", "up_proj")
        self.gate_up = weights.linear(*(f"{module}.{name}" for name in gate_up))
        self.down = weights.linear(f"{module}.down_proj")
        self.activation = shape.activation

    @staticmethod
    def tensors(shape: DecoderShape, module: str, inner: int) -> tuple[TensorSpec, ...]:
        """Of one with `inner` values between its products."""
        hidden, bias = shape.hidden_size, shape.mlp_bias
        down = linear_tensors(f"{module}.down_proj", hidden, inner, bias)
        if shape.fused_tensors:
            return (*linear_tensors(f"{module}.gate_up_proj", 2 * inner, hidden, bias), *down)
        return (
            *linear_tensors(f"{module}.gate_proj", inner, hidden, bias),
            *linear_tensors(f"{module}.up_proj", inner, hidden, bias),
            *down,
        )

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016) in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")
