"""How gemma2 and gemma3 configs read."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    RotaryEmbedding,
    gelu_tanh,
    layer_windows,
    refuse_partial_rotation,
    refuse_unless,
    required,
)

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
}


class Gemma2(DecoderArchitecture):
    """Scaled embeddings, norms around attention and MLP, soft caps; every other layer has a sliding window."""

    name = "gemma2"
    model_types = ("gemma2",)
    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "vocab_size": 256_000, "max_position_embeddings": 8192}
    tied_by_default = True

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        return gemma_shape(
            config,
            full_attention_every=2,
            attention_softcap=config.get("attn_logit_softcapping", 50.0),
            logit_softcap=config.get("final_logit_softcapping", 30.0),
        )


class Gemma3(DecoderArchitecture):
    """As gemma2, with normalized queries and keys, one full layer in six, and a rotary base of its own for those."""

    name = "gemma3"
    model_types = ("gemma3_text",)
    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}
    tied_by_default = True

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "attn_logit_softcapping", None)
        return gemma_shape(
            config,
            full_attention_every=config.get("sliding_window_pattern", 6),
            logit_softcap=config.get("final_logit_softcapping"),
            qk_norms=True,
        )

    def rotaries(self, config: Mapping[str, Any], head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        by_type = config.get("rope_parameters") or {}
        full = by_type.get("full_attention") or config.get("rope_scaling")
        return (
            _rotary(config, head_dim, full, config.get("rope_theta") or 1_000_000.0),
            _rotary(config, head_dim, by_type.get("sliding_attention"), config.get("rope_local_base_freq") or 10_000.0),
        )


def gemma_shape(config: Mapping[str, Any], full_attention_every: int, **differences: Any) -> DecoderShape:
    refuse_unless(config, "hidden_activation", "gelu_pytorch_tanh")
    refuse_unless(config, "use_bidirectional_attention", False)
    refuse_partial_rotation(config)
    bias = bool(config.get("attention_bias", False))
    return DecoderShape.from_config(
        config,
        head_dim=config.get("head_dim") or 256,
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        unit_offset_norms=True,
        activation=gelu_tanh,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        windows=layer_windows(
            config, required(config, "sliding_window"), lambda layer: (layer + 1) % full_attention_every != 0
        ),
        embedding_scale=math.sqrt(required(config, "hidden_size")),
        **differences,
    )


def _rotary(
    config: Mapping[str, Any], head_dim: int, parameters: Mapping[str, Any] | None, base: float
) -> RotaryEmbedding:
    flat = {**config, "rope_scaling": None, "rope_parameters": parameters, "rope_theta": base}
    return RotaryEmbedding.from_config(flat, head_dim)
