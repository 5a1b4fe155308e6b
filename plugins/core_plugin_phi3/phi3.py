"""How a phi3 config reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core import ConfigError
from core.blocks import DecoderArchitecture, DecoderShape, refuse_unless, rope_parameters, size


class Phi3(DecoderArchitecture):
    """q, k and v are one tensor, and so are gate and up. A part of each head may be left unrotated."""

    name = "phi3"
    model_types = ("phi3",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        kind = rope_parameters(config)["rope_type"]
        if kind not in ("default", "longrope", "su"):
            raise ConfigError(f"rope scaling {kind!r} is not supported", "", "phi3 models have longrope")
        return DecoderShape.from_config(
            config,
            fused_tensors=True,
            windows=(config.get("sliding_window"),) * size(config, "num_hidden_layers"),
        )
