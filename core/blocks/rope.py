"""Rotary position embeddings and their scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.blocks.config import required
from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary angles of a batch's rows: `cos` and `sin` [rows, 1, head_dim], the first half of `sin` negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same, each head's halves rotated against each other."""
        low, high = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((high, low), dim=-1), self.sin)


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021), with the scalings `linear` and `llama3`."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
        """Raises ConfigError for a scaling that is not computed here."""
        scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError("partial rotary embeddings are not supported")
        base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "linear":
            frequencies = frequencies / required(scaling, "factor")
        elif kind == "llama3":
            frequencies = _llama3_scaling(frequencies, scaling)
        elif kind != "default":
            raise ConfigError(f"rope scaling {kind!r} is not supported", "", "supported: default, linear, llama3")
        return cls(frequencies)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """int64 [rows] -> the rows' rotation; angles are computed in float32 whatever the dtype."""
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.float()[:, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(dtype)[:, None, :], torch.cat((-sin, sin), dim=-1).to(dtype)[:, None, :]
        )


def _llama3_scaling(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor = required(scaling, "factor")
    low, high = required(scaling, "low_freq_factor"), required(scaling, "high_freq_factor")
    turns = required(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - kept) * frequencies / factor + kept * frequencies
    return scaled
