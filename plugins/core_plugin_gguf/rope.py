"""How a GGUF file scales its rotary position embedding, in the words of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from core import CheckpointError
from core_plugin_gguf.metadata import Metadata
from core_plugin_gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

Factors = Mapping[str, npt.NDArray[np.float32]]
"""By the names of the tensors that have them."""
_UNTRUNCATED = "gpt-oss"
"""The borders between its frequencies are not rounded to whole dimensions."""


def rope_scaling(metadata: Metadata, rope_theta: float, factors: Factors) -> dict[str, Any] | None:
    """What a config.json says by this name. Raises CheckpointError for a scaling that is not read."""
    if LONG_FACTORS in factors and SHORT_FACTORS in factors:
        return _longrope_scaling(metadata, factors)
    kind = metadata.get("rope.scaling.type") or "linear"
    # llama.cpp's older converters wrote the factor by another key, and no type.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{metadata.file} scales its positions by {kind!r}", hint="linear and yarn are read")
    if kind != "yarn" and attention != 1:
        raise CheckpointError(f"{metadata.file} has rope.scaling.attn_factor {attention}", hint="yarn alone has one")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1)
    if ROPE_FACTORS in factors and scaled:
        raise CheckpointError(f"{metadata.file} scales its positions twice", hint="use the model's safetensors")
    if ROPE_FACTORS in factors:
        return _llama3_scaling(metadata.file, rope_theta, factors[ROPE_FACTORS])
    if kind == "yarn":
        return _yarn_scaling(metadata, attention)
    return {"rope_type": "linear", "factor": factor} if scaled else None


def _longrope_scaling(metadata: Metadata, factors: Factors) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": factors[LONG_FACTORS].tolist(),
        "short_factor": factors[SHORT_FACTORS].tolist(),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
    }


def _yarn_scaling(metadata: Metadata, attention: float) -> dict[str, Any]:
    """llama.cpp multiplies the attention factor that YaRN's authors have by two of the file's own."""
    factor = metadata.number("rope.scaling.factor")
    attention *= metadata.number("rope.scaling.yarn_attn_factor", 1.0)
    betas = {beta: metadata.get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    said = {beta: value for beta, value in betas.items() if value is not None}
    if attention != 1:
        said["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    context = metadata.count("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", context),
        **({"truncate": False} if metadata.architecture == _UNTRUNCATED else {}),
        **said,
    }


def _llama3_scaling(file: str, rope_theta: float, factors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The parameters that a converter made `factors` from (rope_type llama3 of transformers).

    Every published model has a low_freq_factor of 1 and a high_freq_factor of 4, so that one number remains: the
    original context length, which each frequency between the two bounds gives away.
    """
    factor = float(factors.max())
    between = (factors > 1) & (factors < factor)
    turns = rope_theta ** (-np.arange(len(factors)) / len(factors)) / (2 * np.pi)
    if between.any():
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        context = round(float(np.median((3 * smooth + 1) / turns[between])))
        smooth = np.clip((context * turns - 1) / 3, 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise CheckpointError(
        f"{file} scales its positions by factors of its own",
        f"{ROPE_FACTORS} is not what Llama 3 models have",
        "use the model's safetensors",
    )
