"""How the configs of qwen3_next and of Qwen3.5's text models read."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core import ConfigError
from core.blocks import DecoderArchitecture, DecoderShape, Delta, refuse_unless, size
from core_plugin_qwen_moe.qwen_moe import qwen_mixture

LINEAR, FULL = "linear_attention", "full_attention"


class Qwen35(DecoderArchitecture):
    """Linear attention by the gated delta rule in most layers, and in every fourth attention whose heads have gates."""

    name = "qwen3_5"
    model_types = ("qwen3_5_text",)
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 256, "partial_rotary_factor": 0.25}
    grouped: ClassVar[bool] = False

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        config = {"intermediate_size": config.get("shared_expert_intermediate_size"), **self.defaults, **config}
        bias = bool(config.get("attention_bias", False))
        delta = Delta(
            layers=linear_layers(config),
            key_heads=config.get("linear_num_key_heads", 16),
            value_heads=config.get("linear_num_value_heads", 32),
            key_dim=config.get("linear_key_head_dim", 128),
            value_dim=config.get("linear_value_head_dim", 128),
            kernel=config.get("linear_conv_kernel_dim", 4),
            grouped=self.grouped,
        )
        return DecoderShape.from_config(
            config,
            qkv_bias=bias,
            output_bias=bias,
            qk_norms=True,
            unit_offset_norms=True,
            gated_attention=True,
            delta=delta if delta.layers else None,
            **self.experts(config),
        )

    def experts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class Qwen35Moe(Qwen35):
    """The same with experts in the place of MLPs."""

    name = "qwen3_5_moe"
    model_types = ("qwen3_5_moe_text",)
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen35.defaults, "norm_topk_prob": True}

    def experts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        shared = size(config, "shared_expert_intermediate_size")
        mixture = qwen_mixture(config, shared_size=shared, shared="shared_expert", shared_gate=True)
        return {"mixture": mixture}


class Qwen3Next(Qwen35Moe):
    """The first of these: with MLPs in some layers, if its config says so."""

    name = "qwen3_next"
    model_types = ("qwen3_next",)
    grouped = True


def linear_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Raises ConfigError for a layer of another type."""
    layers = range(size(config, "num_hidden_layers"))
    every = config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [FULL if (layer + 1) % every == 0 else LINEAR for layer in layers]
    if len(types) != len(layers) or not {LINEAR, FULL}.issuperset(types):
        raise ConfigError(f"layer_types is not {len(layers)} times {LINEAR} or {FULL}", f"it is {types}")
    return frozenset(layer for layer in layers if types[layer] == LINEAR)
