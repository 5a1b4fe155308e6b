"""How deepseek_v2 and deepseek_v3 configs read."""

import math
from collections.abc import Mapping
from typing import Any

from core.blocks import (
    DecoderArchitecture,
    DecoderShape,
    Latent,
    Mixture,
    Scoring,
    first_layers,
    refuse_unless,
    required,
    rope_parameters,
    size,
)

GREEDY, OF_GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2(DecoderArchitecture):
    """Latent attention; experts chosen by a softmax, of all or of the groups with the best ones; and shared ones."""

    name = "deepseek_v2"
    model_types = ("deepseek_v2",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        limited = config.get("topk_method") == OF_GROUPS
        if not limited:
            refuse_unless(config, "topk_method", GREEDY)
        refuse_unless(config, "scoring_func", "softmax")
        refuse_unless(config, "norm_topk_prob", False)
        mixture = deepseek_mixture(
            config,
            groups=required(config, "n_group") if limited else 1,
            groups_chosen=required(config, "topk_group") if limited else 1,
            group_leaders=1,
            scale=config.get("routed_scaling_factor", 1.0),
            shared_experts=config.get("n_shared_experts", 2),
            dense=config.get("first_k_dense_replace", 0),
        )
        return deepseek_shape(config, mixture=mixture, mlp_bias=bool(config.get("mlp_bias", False)))


class DeepseekV3(DecoderArchitecture):
    """As deepseek_v2, with experts chosen by corrected sigmoids, from the groups whose two best are the best.

    The layers after the last one, which predict further tokens, are left out.
    """

    name = "deepseek_v3"
    model_types = ("deepseek_v3",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "topk_method", "noaux_tc")
        refuse_unless(config, "scoring_func", "sigmoid")
        mixture = deepseek_mixture(
            config,
            scoring=Scoring.SIGMOID,
            corrected=True,
            normalised=bool(config.get("norm_topk_prob", True)),
            groups=config.get("n_group", 8),
            groups_chosen=config.get("topk_group", 4),
            scale=config.get("routed_scaling_factor", 2.5),
            shared_experts=config.get("n_shared_experts", 1),
            dense=config.get("first_k_dense_replace", 3),
        )
        return deepseek_shape(config, mixture=mixture, interleaved=bool(config.get("rope_interleave", True)))


def deepseek_mixture(config: Mapping[str, Any], shared_experts: int, dense: int, **differences: Any) -> Mixture:
    refuse_unless(config, "moe_layer_freq", 1)
    return Mixture.from_config(
        config,
        shared_size=size(config, "moe_intermediate_size") * shared_experts,
        dense_layers=first_layers(config, dense),
        **differences,
    )


def deepseek_shape(config: Mapping[str, Any], interleaved: bool = True, **differences: Any) -> DecoderShape:
    refuse_unless(config, "hidden_act", "silu")
    bias = bool(config.get("attention_bias", False))
    latent = Latent(
        rank=config.get("kv_lora_rank", 512),
        rotated=config.get("qk_rope_head_dim", 64),
        plain=config.get("qk_nope_head_dim", 128),
        value=config.get("v_head_dim", 128),
        query_rank=config.get("q_lora_rank", 1536) or 0,
        interleaved=interleaved,
    )
    return DecoderShape.from_config(
        config,
        head_dim=latent.rotated,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=latent.key_width**-0.5 * _sharpened(config),
        latent=latent,
        **differences,
    )


def _sharpened(config: Mapping[str, Any]) -> float:
    """What a scaling of the rotary frequencies multiplies scores by."""
    parameters = rope_parameters(config)
    more = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not more:
        return 1.0
    factor = required(parameters, "factor")
    return (0.1 * more * math.log(factor) + 1) ** 2 if factor > 1 else 1.0
