"""How a mistral config reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core.blocks import DecoderArchitecture, DecoderShape, refuse_partial_rotation, refuse_unless, size


class Mistral(DecoderArchitecture):
    """No biases. All layers have the same sliding window, of 4096 where the config has none, or null for no window."""

    name = "mistral"
    model_types = ("mistral",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
    }

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        refuse_partial_rotation(config)
        return DecoderShape.from_config(
            config, windows=(config.get("sliding_window"),) * size(config, "num_hidden_layers")
        )
