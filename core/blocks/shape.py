"""What the blocks of one family are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from core.blocks.norm import RMSNorm, UnitOffsetRMSNorm


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
    fused_tensors: bool = False
    """q, k and v are one tensor in the checkpoint, and so are gate and up."""
    qk_norms: bool = False
    """Each head of q and k is normalized before it is rotated."""
    post_norms: bool = False
    """What attention and MLP add to the residual stream is normalized too."""
    unit_offset_norms: bool = False
    activation: Callable[[Tensor], Tensor] = F.silu
    attention_scale: float | None = None
    """What products of q and k are multiplied by; None is the usual 1 / sqrt(head_dim)."""
    windows: tuple[int | None, ...] = ()
    """How many positions each layer looks back on, its own included; None is all, and so is an empty tuple."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None

    def norm(self, weight: Tensor) -> RMSNorm:
        kind = UnitOffsetRMSNorm if self.unit_offset_norms else RMSNorm
        return kind(weight, self.norm_eps)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
