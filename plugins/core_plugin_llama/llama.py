"""How a llama config reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core.blocks import DecoderArchitecture, DecoderShape, refuse_partial_rotation, refuse_unless


class Llama(DecoderArchitecture):
    """Biases only where the config asks for them: `attention_bias` on q, k, v and the output, `mlp_bias` on the MLP."""

    name = "llama"
    model_types = ("llama",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        refuse_partial_rotation(config)
        attention_bias = bool(config.get("attention_bias", False))
        return DecoderShape.from_config(
            config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
