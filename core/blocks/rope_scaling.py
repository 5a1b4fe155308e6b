"""The scalings of rotary frequencies, by the names that configs use.

Each takes the unscaled inverse frequencies and the parameters of core.blocks.rope.rope_parameters, and returns the
scaled ones and what rotated values are multiplied by. What they compute is what transformers computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.blocks.config import required
from core.errors import ConfigError

Parameters = Mapping[str, Any]
Scaled = tuple[Tensor, float]


def _default(frequencies: Tensor, parameters: Parameters) -> Scaled:
    """Also for `dynamic` (NTK-aware): it scales only texts that are longer than `max_position_embeddings`."""
    return frequencies, 1.0


def _linear(frequencies: Tensor, parameters: Parameters) -> Scaled:
    """Position interpolation (Chen et al. 2023)."""
    return frequencies / required(parameters, "factor"), 1.0


def _llama3(frequencies: Tensor, parameters: Parameters) -> Scaled:
    """Llama 3.1's: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor = required(parameters, "factor")
    low, high = required(parameters, "low_freq_factor"), required(parameters, "high_freq_factor")
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def _yarn(frequencies: Tensor, parameters: Parameters) -> Scaled:
    """YaRN (Peng et al. 2023): as llama3, but interpolated along the index of a frequency."""
    factor = required(parameters, "factor")
    fast = _index_of(parameters.get("beta_fast") or 32, len(frequencies), parameters)
    slow = _index_of(parameters.get("beta_slow") or 1, len(frequencies), parameters)
    if parameters.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * len(frequencies) - 1)
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first or 0.001)).clamp(0, 1)
    return (1 - divided) * frequencies + divided * frequencies / factor, _yarn_magnitude(factor, parameters)


def _index_of(turns: float, count: int, parameters: Parameters) -> float:
    """The index of the frequency that turns `turns` times within the context of the first training."""
    frequency = 2 * math.pi * turns / parameters["original_max_position_embeddings"]
    return -count * math.log(frequency) / math.log(parameters["rope_theta"])


def _yarn_magnitude(factor: float, parameters: Parameters) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    growth = 0.1 * math.log(max(factor, 1.0))
    all_dims = parameters.get("mscale_all_dim")
    if parameters.get("mscale") and all_dims:
        return float((parameters["mscale"] * growth + 1) / (all_dims * growth + 1))
    return growth + 1


def _longrope(frequencies: Tensor, parameters: Parameters) -> Scaled:
    """LongRoPE (Ding et al. 2024), within the context of the first training: each frequency has its own factor."""
    factors = torch.tensor(required(parameters, "short_factor"), dtype=torch.float32)
    if len(factors) != len(frequencies):
        raise ConfigError(f"short_factor has {len(factors)} numbers", f"there are {len(frequencies)} frequencies")
    return frequencies / factors, _longrope_magnitude(parameters)


def _longrope_magnitude(parameters: Parameters) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / trained
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


SCALINGS: dict[str, Callable[[Tensor, Parameters], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
