"""How a llama config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, head_dim, refuse_unless, required


class Llama(DecoderArchitecture):
    """Biases only where the config asks for them: `attention_bias` on q, k, v and the output, `mlp_bias` on the MLP."""

    name = "llama"
    model_types = ("llama",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        heads = required(config, "num_attention_heads")
        attention_bias = bool(config.get("attention_bias", False))
        return DecoderShape(
            hidden_size=required(config, "hidden_size"),
            intermediate_size=required(config, "intermediate_size"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim(config),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
