"""Self-attention."""

from __future__ import annotations

import torch
from torch import Tensor

from core.blocks.linear import linear_tensors
from core.blocks.norm import RMSNorm
from core.blocks.rope import Rotation
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import Batch, TensorSpec, Weights


class Attention:
    """Causal self-attention with grouped keys and values; q, k and v come from one fused product."""

    def __init__(self, shape: DecoderShape, layer: int, weights: Weights) -> None:
        prefix = _prefix(layer)
        qkv = ("qkv_proj",) if shape.fused_tensors else ("q_proj", "k_proj", "v_proj")
        self.qkv = weights.linear(*(f"{prefix}.{name}" for name in qkv))
        self.qk_norm = _qk_norm(shape, layer, weights) if shape.qk_norms else None
        self.out = weights.linear(f"{prefix}.o_proj")
        self.layer = layer
        self.head_dim = shape.head_dim
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.scale = shape.attention_scale or shape.head_dim**-0.5
        self.window, self.softcap = shape.window(layer), shape.attention_softcap
        self.sinks = weights.tensor(f"{prefix}.sinks") if shape.sinks else None

    @staticmethod
    def tensors(shape: DecoderShape, layer: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, bias = _prefix(layer), shape.hidden_size, shape.qkv_bias
        width, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_rows = 2 * width if shape.gated_attention else width
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        if shape.fused_tensors:
            rows = {"qkv_proj": q_rows + 2 * kv_rows}
        norms = ("q_norm", "k_norm") if shape.qk_norms else ()
        sinks = (TensorSpec(f"{prefix}.sinks", (shape.heads,)),) if shape.sinks else ()
        return (
            *(spec for name in rows for spec in linear_tensors(f"{prefix}.{name}", rows[name], hidden, bias)),
            *(TensorSpec(f"{prefix}.{name}.weight", (shape.head_dim,)) for name in norms),
            *linear_tensors(f"{prefix}.o_proj", hidden, width, shape.output_bias),
            *sinks,
        )

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden] -> q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]."""
        qkv = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        qk = rotation(qk if self.qk_norm is None else self.qk_norm(qk))
        return qk[:, : self.heads], qk[:, self.heads :], v

    def attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[rows, heads * head_dim], for `out`."""
        attended = batch.attend(
            self.layer, q, k, v, scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks
        )
        return attended.flatten(1)


class GatedAttention(Attention):
    """Attention whose heads each have a gate for their result, made by the same product as the queries."""

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """The gates are behind the queries: q [rows, heads, 2 * head_dim]."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        gated, k, v = torch.split_with_sizes(heads, (2 * self.heads, self.kv_heads, self.kv_heads), dim=1)
        qk = torch.cat((gated[:, ::2], k), dim=1)
        qk = rotation(qk if self.qk_norm is None else self.qk_norm(qk))
        return torch.cat((qk[:, : self.heads], gated[:, 1::2]), dim=-1), qk[:, self.heads :], v

    def attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, gates = q.chunk(2, dim=-1)
        return super().attend(batch, queries, k, v) * gates.sigmoid().flatten(1)


def _qk_norm(shape: DecoderShape, layer: int, weights: Weights) -> RMSNorm:
    """One norm for the heads of q and k, [heads + kv_heads, head_dim], with each its own weight."""
    q, k = (weights.tensor(f"{_prefix(layer)}.{name}.weight") for name in ("q_norm", "k_norm"))
    return shape.norm(torch.cat((q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1))))


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"
