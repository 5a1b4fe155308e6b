"""How a gpt_oss config reads."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor

from core import ModelSpec
from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    DecoderSpec,
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

    def read_config(self, config: Mapping[str, Any]) -> DecoderSpec:
        return replace(super().read_config(config), fused_experts=True)

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
                gate=_gate(config),
                router="router",
                fused=True,
                transposed=True,
                biased=True,
            ),
        )

    def _shape_of(self, spec: ModelSpec) -> DecoderShape:
        """Where each expert's weights are tensors of their own, as in GGUF files, gate and up are too."""
        shape = self.shape(spec.config)
        if shape.mixture is None or cast("DecoderSpec", spec).fused_experts:
            return shape
        gate = _gate(spec.config, interleaved=False)
        return replace(shape, mixture=replace(shape.mixture, fused=False, transposed=False, gate=gate))

    def rotaries(self, config: Mapping[str, Any], head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or YARN
        return super().rotaries({**config, "rope_scaling": scaling}, head_dim)


def _gate(config: Mapping[str, Any], *, interleaved: bool = True) -> Callable[[Tensor], Tensor]:
    alpha, limit = config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)
    return partial(clamped_gate, alpha=alpha, limit=limit, interleaved=interleaved)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float, *, interleaved: bool = True) -> Tensor:
    """[rows, 2 * width] with gate and up in turn, or one behind the other -> [rows, width]."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * (alpha * gate).sigmoid())
