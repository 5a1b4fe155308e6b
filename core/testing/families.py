"""Tiny seeded checkpoints of any decoder family that transformers knows, saved by transformers itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS = 4
VOCABULARY = 320

_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embed_dim": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "rotary_dim": 8,
    "sliding_window": 12,
    "attention_window_size": 12,
    "attention_chunk_size": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "moe_ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 48,
    "expert_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "state_size": 8,
    "lru_width": 64,
    "block_ff_dim": 96,
    "block_dim": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""By the name of a config's field: what is small enough, wherever a family has such a field."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"topk_method": "greedy"},
    "falcon": {"new_decoder_architecture": True},
    "falcon_mamba": {"intermediate_size": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "mpt": {"expansion_ratio": 2},
    "phi3": {"pad_token_id": 0},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """The model types of what transformers calls causal language models, without encoders and what reads images."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    return [
        kind
        for kind, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if (kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or "decoder" in kind)
        and name.endswith(("ForCausalLM", "LMHeadModel"))
        and not getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    ]


def tiny_family(directory: Path, model_type: str, *, seed: int = 0, **fields: Any) -> Path:
    """Saves a model of `model_type` with four small layers and random weights to `directory`, and returns it.

    `fields` are set in the config as they are. The weights follow from `seed` alone; norms and biases are not at
    their neutral values. There is no tokenizer.
    """
    from transformers import AutoModelForCausalLM

    config = _tiny_config(model_type, fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
    model.save_pretrained(directory)
    return directory


def _tiny_config(model_type: str, fields: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    text = kind.sub_configs.get("text_config")
    if text is None:
        return kind(**{**_small(kind), **_OWN.get(model_type, {}), **fields})
    return kind(text_config=text(**{**_small(text), **fields}).to_dict())


def _small(kind: Any) -> dict[str, Any]:
    """The fields of a config class that are set to something small."""
    known = {name for base in kind.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    small = {
        name: value
        for name, value in _SMALL.items()
        if name in known | set(kind.attribute_map) and not isinstance(getattr(kind, name, None), property)
    }
    for alias, name in kind.attribute_map.items():
        if alias in small and name in small:
            del small[alias]
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _random(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim < 2 or "A_log" in name or "conv" in name:
        return parameter + 0.1 * noise
    if parameter.shape[0] == VOCABULARY:
        return 0.3 * noise
    return 1.2 / math.sqrt(parameter.shape[-1]) * noise
