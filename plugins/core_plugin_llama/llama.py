"""How a llama config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, refuse_unless


class Llama(DecoderArchitecture):
    """Biases only where the config asks for them: `attention_bias` on q, k, v and the output, `mlp_bias` on the MLP."""

    name = "llama"
    model_types = ("llama",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        attention_bias = bool(config.get("attention_bias", False))
        return DecoderShape.from_config(
            config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
