"""How a qwen3 config reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    layer_windows,
    refuse_partial_rotation,
    refuse_unless,
    required,
)

HEAD_DIM = 128


class Qwen3(DecoderArchitecture):
    """Heads of their own width, whose queries and keys are normalized. The last layers may have a sliding window."""

    name = "qwen3"
    model_types = ("qwen3",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
    }

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        refuse_partial_rotation(config)
        bias = bool(config.get("attention_bias", False))
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        return DecoderShape.from_config(
            config,
            head_dim=config.get("head_dim") or HEAD_DIM,
            qkv_bias=bias,
            output_bias=bias,
            qk_norms=True,
            windows=layer_windows(config, window, lambda layer: layer >= required(config, "max_window_layers")),
        )
