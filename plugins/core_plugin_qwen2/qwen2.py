"""How a qwen2 config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, layer_windows, refuse_unless, required


class Qwen2(DecoderArchitecture):
    """Biases on q, k and v, none elsewhere. The last layers may have a sliding window."""

    name = "qwen2"
    model_types = ("qwen2",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        return DecoderShape.from_config(
            config,
            qkv_bias=True,
            windows=layer_windows(config, window, lambda layer: layer >= required(config, "max_window_layers")),
        )
