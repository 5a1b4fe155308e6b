"""How a mistral config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, layer_windows, refuse_unless


class Mistral(DecoderArchitecture):
    """No biases. All layers have the same sliding window, of 4096 where the config has none, or null for no window."""

    name = "mistral"
    model_types = ("mistral",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        window = config.get("sliding_window", 4096)
        return DecoderShape.from_config(config, windows=layer_windows(config, window, lambda layer: True))
