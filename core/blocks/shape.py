"""What the blocks of one family are built from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """How one family's config reads: sizes in values, not bytes."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
