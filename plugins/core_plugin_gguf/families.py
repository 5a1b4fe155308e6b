"""What the families of GGUF files have beside a llama's config, in the words of a Hugging Face config.json.

Sources: llama.cpp's src/models, and what its convert_hf_to_gguf.py makes of a config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from core_plugin_gguf.metadata import Metadata

Shapes = Mapping[str, Sequence[int]]
"""Those of a file's tensors."""
_WINDOW, _ROTATED = "attention.sliding_window", "rope.dimension_count"
_GEMMA3_27B_LAYERS = 62


class Family(NamedTuple):
    """`model_type` is transformers' name of it. `keys` change what it computes, and `more` reads them."""

    model_type: str
    more: Callable[[Metadata, Shapes], Mapping[str, Any]]
    keys: frozenset[str] = frozenset()
    interleaved: bool = False
    """The rows of q and k are stored with each head's two halves interleaved."""
    unit_offset: bool = False
    """Norms are stored with 1 added."""
    experts: bool = False


def _llama(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}


def _qwen2(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    return {}


def _qwen3(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in shapes}


def _qwen3moe(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    return {**_qwen3(metadata, shapes), **_mixture(metadata, shapes), "norm_topk_prob": True}


def _qwen2moe(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    shared = shapes.get("blk.0.ffn_down_shexp.weight", (0, 0))[1]
    return {**_mixture(metadata, shapes), "norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _mixture(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    layers = range(metadata.count("block_count"))
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_exps.weight" not in shapes],
    }


def _gpt_oss(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "sliding_window": metadata.count(_WINDOW, 128),
    }


def _gemma3(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    width = metadata.count("attention.key_length", 256)
    if metadata.count("block_count") == _GEMMA3_27B_LAYERS:
        width = metadata.count("embedding_length") // metadata.count("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "sliding_window": metadata.count(_WINDOW, 1024),
        "sliding_window_pattern": 6,
    }


def _phi3(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    """A window that spans the whole context is none."""
    context, window = metadata.count("context_length"), metadata.get(_WINDOW)
    heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", metadata.count("embedding_length") // heads)
    return {
        "sliding_window": window if window and window < context else None,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", context),
        "partial_rotary_factor": metadata.count(_ROTATED, head_dim) / head_dim,
    }


def _granite(metadata: Metadata, shapes: Shapes) -> Mapping[str, Any]:
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**_llama(metadata, shapes), **{name: metadata.number(key, 1.0) for name, key in scales.items()}}


_SCALES = frozenset(("embedding_scale", "residual_scale", "attention.scale", "logit_scale"))
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _llama, interleaved=True),
    "qwen2": Family("qwen2", _qwen2),
    "qwen3": Family("qwen3", _qwen3),
    "qwen2moe": Family("qwen2_moe", _qwen2moe, experts=True),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, experts=True),
    "gpt-oss": Family("gpt_oss", _gpt_oss, frozenset((_WINDOW,)), experts=True),
    "gemma3": Family("gemma3_text", _gemma3, frozenset((_WINDOW, "rope.freq_base_swa")), unit_offset=True),
    "phi3": Family("phi3", _phi3, frozenset((_WINDOW, _ROTATED))),
    "granite": Family("granite", _granite, _SCALES, interleaved=True),
}
"""By what GGUF files call their architecture."""
