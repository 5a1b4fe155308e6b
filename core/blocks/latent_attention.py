"""Multi-head latent attention (DeepSeek-AI 2024): all heads' keys and values are made of one small row per token.

That row alone is cached: a latent, and a rotated part of the keys that all heads share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core.blocks.linear import linear_tensors
from core.blocks.norm import RMSNorm
from core.blocks.rope import Rotation
from core.blocks.shape import DecoderShape, Latent
from core.interfaces.architecture import Batch, TensorSpec, Weights
from core.interfaces.quantizer import Linear
from core.runtime.device import matmul_dtype
from core.runtime.kv_cache import causal_attention
from core.runtime.unquantized import multiply

_EPS = 1e-6
"""Of the norms of latents, whatever the config says of others."""
_MANY_ROWS = 1 << 10


class LatentAttention:
    """Causal self-attention over latents.

    A few rows attend to the latents themselves: what makes keys of them multiplies the queries in their place, and what
    makes values, the results. For many rows that is more work than to make the keys and values.
    """

    def __init__(self, shape: DecoderShape, latent: Latent, layer: int, weights: Weights) -> None:
        prefix = _prefix(layer)
        self.latent, self.layer, self.heads = latent, layer, shape.heads
        self.scale = shape.attention_scale or latent.key_width**-0.5
        self.queries = _Queries(latent, prefix, weights)
        self.kv_norm = RMSNorm(weights.tensor(f"{prefix}.kv_a_layernorm.weight"), _EPS)
        self.weight = weights.tensor(f"{prefix}.kv_b_proj.weight")
        by_head = self.weight.view(shape.heads, -1, latent.rank)
        self.to_keys, self.to_values = by_head[:, : latent.plain], by_head[:, latent.plain :].mT
        self.out = weights.linear(f"{prefix}.o_proj")
        self.few = latent.rank * (latent.plain + latent.value) // (2 * max(1, latent.rank - latent.plain))

    @staticmethod
    def tensors(shape: DecoderShape, latent: Latent, layer: int) -> tuple[TensorSpec, ...]:
        """`kv_b_proj` multiplies from both sides, so it is not packed."""
        prefix = _prefix(layer)
        inner = shape.heads * (latent.plain + latent.value)
        return (
            *_Queries.tensors(shape, latent, prefix),
            TensorSpec(f"{prefix}.kv_a_layernorm.weight", (latent.rank,)),
            TensorSpec(f"{prefix}.kv_b_proj.weight", (inner, latent.rank)),
            *linear_tensors(f"{prefix}.o_proj", shape.hidden_size, shape.heads * latent.value, shape.output_bias),
        )

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden] -> q [rows, heads, plain + rotated], and what is cached: latent and key [rows, 1, width]."""
        latent = self.latent
        queries, compressed = self.queries(x)
        plain, rotated = _parts(queries.view(len(x), self.heads, -1), latent.plain, latent.rotated)
        made, key = _parts(compressed, latent.rank, latent.rotated)
        turned = torch.cat((rotated, key[:, None]), dim=1)
        turned = rotation(_halves(turned) if latent.interleaved else turned)
        return torch.cat((plain, turned[:, :-1]), dim=-1), self.kv_norm(made)[:, None], turned[:, -1:]

    def attend(self, batch: Batch, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """[rows, heads * value], for `out`."""
        row = torch.cat((latent, key), dim=-1)
        cached = batch.extend(self.layer, row, row[..., :0])
        parts = [
            self._attended(q[segment.rows], rows, segment.start)
            for segment, (rows, _) in zip(batch.segments, cached, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attended(self, q: Tensor, cached: Tensor, start: int) -> Tensor:
        """Of a segment: q [rows, heads, key width], cached [1, start + rows, rank + rotated]."""
        attended = self._absorbed(q, cached, start) if len(q) <= self.few else self._expanded(q, cached, start)
        return attended.reshape(len(q), -1)

    def _absorbed(self, q: Tensor, cached: Tensor, start: int) -> Tensor:
        plain, rotated = _parts(q, self.latent.plain, self.latent.rotated)
        queries = torch.cat((_by_head(plain, self.to_keys), rotated), dim=-1)
        attended = causal_attention(queries, cached, cached, start, self.scale)
        return _by_head(attended[..., : self.latent.rank], self.to_values)

    def _expanded(self, q: Tensor, cached: Tensor, start: int) -> Tensor:
        """Values are as wide as keys while they are attended to: so torch has fast kernels."""
        latents, keys = _parts(cached[0], self.latent.rank, self.latent.rotated)
        made = multiply(latents, self.weight).view(len(latents), self.heads, -1)
        plain, values = _parts(made, self.latent.plain, self.latent.value)
        keys = torch.cat((plain, keys[:, None].expand(-1, self.heads, -1)), dim=-1)
        values = F.pad(values, (0, self.latent.key_width - self.latent.value))
        attended = causal_attention(q, keys.transpose(0, 1), values.transpose(0, 1), start, self.scale)
        return attended[..., : self.latent.value]


class _Queries:
    """The first products: queries, by way of a latent of their own or not, and the row that is to be cached."""

    def __init__(self, latent: Latent, prefix: str, weights: Weights) -> None:
        self.widths = (latent.query_rank, latent.rank + latent.rotated)
        self.norm: RMSNorm | None = None
        self.up: Linear | None = None
        if latent.query_rank:
            self.down = [weights.linear(f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa")]
            self.norm = RMSNorm(weights.tensor(f"{prefix}.q_a_layernorm.weight"), _EPS)
            self.up = weights.linear(f"{prefix}.q_b_proj")
        else:
            self.down = [weights.linear(f"{prefix}.{name}") for name in ("q_proj", "kv_a_proj_with_mqa")]

    @staticmethod
    def tensors(shape: DecoderShape, latent: Latent, prefix: str) -> tuple[TensorSpec, ...]:
        rows, cached, bias = shape.heads * latent.key_width, latent.rank + latent.rotated, shape.qkv_bias
        compressed = linear_tensors(f"{prefix}.kv_a_proj_with_mqa", cached, shape.hidden_size, bias)
        if not latent.query_rank:
            return (*linear_tensors(f"{prefix}.q_proj", rows, shape.hidden_size), *compressed)
        return (
            *linear_tensors(f"{prefix}.q_a_proj", latent.query_rank, shape.hidden_size, bias),
            TensorSpec(f"{prefix}.q_a_layernorm.weight", (latent.query_rank,)),
            *linear_tensors(f"{prefix}.q_b_proj", rows, latent.query_rank),
            *compressed,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] -> [rows, heads * key width], [rows, rank + rotated]."""
        if self.norm is None or self.up is None:
            queries, compressed = (linear(x) for linear in self.down)
            return queries, compressed
        queries, compressed = _parts(self.down[0](x), *self.widths)
        return self.up(self.norm(queries)), compressed


def _parts(x: Tensor, *widths: int) -> Sequence[Tensor]:
    """Of the last dimension."""
    return torch.split_with_sizes(x, widths, dim=-1)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, heads, in] times weight [heads, in, out] -> [rows, heads, out], in a wider dtype if that is faster."""
    wide = matmul_dtype(x.device, x.dtype, _MANY_ROWS)
    return torch.bmm(x.transpose(0, 1).to(wide), weight.to(wide)).transpose(0, 1).to(x.dtype)


def _halves(x: Tensor) -> Tensor:
    """[..., width] with the two values of each pair side by side -> all first ones, then all second ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"
