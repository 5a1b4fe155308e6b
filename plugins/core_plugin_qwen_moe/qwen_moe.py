"""How qwen2_moe and qwen3_moe configs read."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, Mixture, layer_windows, refuse_unless, size


class Qwen2Moe(DecoderArchitecture):
    """As qwen2, with experts in the place of most or all MLPs, and one that all tokens share, behind a gate.

    Where there is a sliding window, every other one of the first layers has it.
    """

    name = "qwen2_moe"
    model_types = ("qwen2_moe",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        last = config.get("max_window_layers", 28)
        return DecoderShape.from_config(
            config,
            qkv_bias=bool(config.get("qkv_bias", True)),
            windows=layer_windows(config, window, lambda layer: layer % 2 == 0 and layer < last),
            mixture=qwen_mixture(
                config,
                shared_size=size(config, "shared_expert_intermediate_size"),
                shared="shared_expert",
                shared_gate=True,
            ),
        )


class Qwen3Moe(DecoderArchitecture):
    """As qwen3, with experts in the place of most or all MLPs, and with a sliding window in all layers or in none."""

    name = "qwen3_moe"
    model_types = ("qwen3_moe",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        bias = bool(config.get("attention_bias", False))
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        return DecoderShape.from_config(
            config,
            qkv_bias=bias,
            output_bias=bias,
            qk_norms=True,
            windows=layer_windows({**config, "layer_types": None}, window, lambda layer: True),
            mixture=qwen_mixture(config),
        )


def qwen_mixture(config: Mapping[str, Any], **differences: Any) -> Mixture:
    return Mixture.from_config(
        config,
        normalised=bool(config.get("norm_topk_prob", False)),
        dense_layers=_dense_layers(config),
        **differences,
    )


def _dense_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Those of `mlp_only_layers`; and of the others, only each `decoder_sparse_step`th one has experts."""
    step = config.get("decoder_sparse_step") or 1
    named = config.get("mlp_only_layers") or ()
    skipped = (layer for layer in range(size(config, "num_hidden_layers")) if (layer + 1) % step) if step > 1 else ()
    return frozenset((*named, *skipped))
