"""What the blocks of one family are built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from core.blocks.config import checked_size, head_dim, required
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

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no model has, before anything as large is made."""
        for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"):
            checked_size(name, getattr(self, name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **differences: Any) -> DecoderShape:
        """The sizes that all configs name alike, and in what the family differs. Raises ConfigError."""
        heads = required(config, "num_attention_heads")
        usual: dict[str, Any] = {
            "hidden_size": required(config, "hidden_size"),
            "intermediate_size": required(config, "intermediate_size"),
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": head_dim(config),
            "norm_eps": required({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps"),
        }
        return cls(**{**usual, **differences})

    def norm(self, weight: Tensor) -> RMSNorm:
        kind = UnitOffsetRMSNorm if self.unit_offset_norms else RMSNorm
        return kind(weight, self.norm_eps)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
