"""How a qwen2 config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, head_dim, refuse_unless, required


class Qwen2(DecoderArchitecture):
    """Biases on q, k and v, none elsewhere. Sliding windows, which its configs can ask for, are refused."""

    name = "qwen2"
    model_types = ("qwen2",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        refuse_unless(config, "use_sliding_window", False)
        heads = required(config, "num_attention_heads")
        return DecoderShape(
            hidden_size=required(config, "hidden_size"),
            intermediate_size=required(config, "intermediate_size"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim(config),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            qkv_bias=True,
        )
