"""Self-attention."""

from __future__ import annotations

from torch import Tensor

from core.blocks.rope import Rotation
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import Batch, Weights


class Attention:
    """Causal self-attention with grouped keys and values; q, k and v come from one fused product."""

    def __init__(self, shape: DecoderShape, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.qkv = weights.linear(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self.out = weights.linear(f"{prefix}.o_proj")
        self.layer = layer
        self.head_dim = shape.head_dim
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.scale = shape.head_dim**-0.5

    def __call__(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        qkv = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        qk = rotation(qkv[:, : self.heads + self.kv_heads])
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, self.heads + self.kv_heads :]
        return self.out(batch.attend(self.layer, q, k, v, scale=self.scale).flatten(1))
