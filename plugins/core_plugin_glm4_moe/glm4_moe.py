"""How a glm4_moe config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    Mixture,
    RotaryEmbedding,
    Scoring,
    first_layers,
    refuse_unless,
    size,
)


class Glm4Moe(DecoderArchitecture):
    """Experts chosen by corrected sigmoids, a shared one, a few dense layers first; half of each head is rotated.

    The layers after the last one, which predict further tokens, are left out.
    """

    name = "glm4_moe"
    model_types = ("glm4_moe",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        inner = size(config, "moe_intermediate_size")
        return DecoderShape.from_config(
            config,
            norm_eps=config.get("rms_norm_eps", 1e-5),
            qkv_bias=bool(config.get("attention_bias", False)),
            qk_norms=bool(config.get("use_qk_norm", False)),
            mixture=Mixture.from_config(
                config,
                scoring=Scoring.SIGMOID,
                corrected=True,
                normalised=bool(config.get("norm_topk_prob", True)),
                scale=config.get("routed_scaling_factor", 1.0),
                groups=config.get("n_group", 1),
                groups_chosen=config.get("topk_group", 1),
                shared_size=inner * config.get("n_shared_experts", 1),
                dense_layers=first_layers(config, config.get("first_k_dense_replace", 1)),
            ),
        )

    def rotaries(self, config: Mapping[str, Any], head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        rotated = config.get("partial_rotary_factor") or 0.5
        return super().rotaries({**config, "partial_rotary_factor": rotated}, head_dim)
