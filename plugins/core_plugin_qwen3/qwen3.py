"""How a qwen3 config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, layer_windows, refuse_unless, required

HEAD_DIM = 128


class Qwen3(DecoderArchitecture):
    """Heads of their own width, whose queries and keys are normalized. The last layers may have a sliding window."""

    name = "qwen3"
    model_types = ("qwen3",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
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
