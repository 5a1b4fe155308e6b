"""How a gpt_oss config reads."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    Mixture,
    RotaryEmbedding,
    head_dim,
    layer_windows,
    required,
)

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling of a config that has none."""


class GptOss(DecoderArchitecture):
    """Biases everywhere, attention sinks, every other layer with a sliding window, and experts with a clamped gate."""

    name = "gpt_oss"
    model_types = ("gpt_oss",)
    defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 150_000.0}

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        bias = bool(config.get("attention_bias", True))
        return DecoderShape.from_config(
            config,
            head_dim=head_dim({"head_dim": 64, **config}),
            norm_eps=config.get("rms_norm_eps", 1e-5),
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
            windows=layer_windows(config, config.get("sliding_window", 128), lambda layer: layer % 2 == 0),
            mixture=Mixture.from_config(
                config,
                intermediate_size=required(config, "intermediate_size"),
                normalised=True,
                gate=partial(
                    clamped_gate, alpha=config.get("swiglu_alpha", 1.702), limit=config.get("swiglu_limit", 7.0)
                ),
                router="router",
                fused=True,
                transposed=True,
                biased=True,
            ),
        )

    def rotaries(self, config: Mapping[str, Any], head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or YARN
        return super().rotaries({**config, "rope_scaling": scaling}, head_dim)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """[rows, 2 * width] with gate and up in turn -> [rows, width]."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * (alpha * gate).sigmoid())
