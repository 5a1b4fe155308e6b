"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from core.blocks.config import required
from core.blocks.rope_scaling import SCALINGS
from core.errors import ConfigError

_NAMES = ("rope_type", "type")


class Rotation(NamedTuple):
    """The rotary angles of a batch's rows: `cos` and `sin` [rows, 1, rotated], the first half of `sin` negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same, the first `rotated` values of each head turned half against half."""
        rotated = self.cos.shape[-1]
        if rotated < x.shape[-1]:
            return torch.cat((self(x[..., :rotated]), x[..., rotated:]), dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((high, low), dim=-1), self.sin)


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021), scaled as the config asks, of the first values of each head.

    `magnitude` is what rotated values are multiplied by: scalings that lengthen the context sharpen attention so.
    """

    def __init__(self, inverse_frequencies: Tensor, magnitude: float = 1.0) -> None:
        self.inverse_frequencies = inverse_frequencies
        self.magnitude = magnitude

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> Self:
        """Raises ConfigError for a scaling that is not computed here."""
        parameters = rope_parameters(config)
        rotated = int(head_dim * parameters["partial_rotary_factor"])
        if not 0 < rotated <= head_dim:
            raise ConfigError(f"partial_rotary_factor rotates {rotated} of {head_dim} values")
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        scaling = SCALINGS.get(parameters["rope_type"])
        if scaling is None:
            supported = ", ".join(SCALINGS)
            raise ConfigError(
                f"rope scaling {parameters['rope_type']!r} is not supported", "", f"supported: {supported}"
            )
        return cls(*scaling(parameters["rope_theta"] ** -exponents, parameters))

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """int64 [rows] -> the rows' rotation; angles are computed in float32 whatever the dtype."""
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.float()[:, None] * self.inverse_frequencies
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(dtype)[:, None, :], torch.cat((-sin, sin), dim=-1).to(dtype)[:, None, :]
        )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's `rope_scaling`, or `rope_parameters` as transformers 5 writes it, with what they leave to others.

    `max_position_embeddings` is among them.
    """
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    trained = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    longest = required(config, "max_position_embeddings")
    words = {key: value for key, value in given.items() if isinstance(value, str) and key not in _NAMES}
    if words:
        raise ConfigError(f"the rope parameters {words} make no model", "", "they have to be numbers")
    return {
        "rope_theta": config.get("rope_theta") or 10_000.0,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
        **given,
        "rope_type": given.get("rope_type") or given.get("type") or "default",
        "max_position_embeddings": longest,
        "original_max_position_embeddings": trained or longest,
    }


def context_length(config: Mapping[str, Any]) -> int:
    """How many positions a model's rotary embedding is the same for, whatever the length of a text.

    With `longrope` all positions turn by other frequencies once a text is longer than those the model was first
    trained on; keys that are cached have turned already. So the context ends there.
    """
    parameters = rope_parameters(config)
    longest, trained = parameters["max_position_embeddings"], parameters["original_max_position_embeddings"]
    if parameters["rope_type"] in ("longrope", "su"):
        return int(min(longest, trained))
    if parameters["rope_type"] == "yarn":
        return int(max(longest, trained * required(parameters, "factor")))
    return int(longest)
