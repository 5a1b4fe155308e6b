"""What the blocks of one family are built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from core.blocks.config import checked_size, head_dim, required
from core.blocks.mixture import Mixture
from core.blocks.norm import RMSNorm, UnitOffsetRMSNorm
from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of multi-head latent attention, in values."""

    rank: int
    """Of the row that all heads' keys and values are made of."""
    rotated: int
    """Of each head's key that is rotated, and the same for all heads."""
    plain: int
    """Of each head's key that is not."""
    value: int
    query_rank: int = 0
    """Of the row that queries are made of; 0 is none."""
    interleaved: bool = True
    """The two values of each rotated pair lie side by side, not half a width apart."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no model has."""
        for name in ("rank", "rotated", "plain", "value"):
            checked_size(name, getattr(self, name))
        if self.value > self.key_width:
            raise ConfigError(f"values of {self.value} behind keys of {self.key_width} are not supported")

    @property
    def key_width(self) -> int:
        return self.plain + self.rotated


@dataclass(frozen=True, slots=True)
class Delta:
    """The sizes of linear attention by the gated delta rule, in values, and its layers."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """How many rows the convolution sees, its own included."""
    grouped: bool = False
    """The first products' outputs lie together for each key head."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no model has."""
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            checked_size(name, getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ConfigError(f"{self.key_heads} key heads can't serve {self.value_heads} value heads")

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Queries, keys and values, as they are convolved."""
        return 2 * self.key_heads * self.key_dim + self.values


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
    sinks: bool = False
    """Each head has a score of its own that takes a part of its attention, and gives nothing."""
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    latent: Latent | None = None
    """Attention is over latents; `head_dim` is what is rotated of a head."""
    gated_attention: bool = False
    """Each head's queries come with a gate for its result."""
    delta: Delta | None = None
    """What is in the place of attention in some layers."""
    mixture: Mixture | None = None
    """What is in the place of MLPs, but in the mixture's dense layers."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no model has, before anything as large is made."""
        for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"):
            checked_size(name, getattr(self, name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **differences: Any) -> Self:
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

    @property
    def kv_width(self) -> int:
        """Values that a token leaves in one layer's cache."""
        return 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.rank + self.latent.rotated

    @property
    def kv_rows(self) -> int:
        """Of keys and of values, that a token leaves there."""
        return 2 * self.kv_heads if self.latent is None else 1

    def norm(self, weight: Tensor) -> RMSNorm:
        kind = UnitOffsetRMSNorm if self.unit_offset_norms else RMSNorm
        return kind(weight, self.norm_eps)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def delta_of(self, layer: int) -> Delta | None:
        return self.delta if self.delta is not None and layer in self.delta.layers else None

    def mixture_of(self, layer: int) -> Mixture | None:
        dense = self.mixture is None or layer in self.mixture.dense_layers
        return None if dense else self.mixture
