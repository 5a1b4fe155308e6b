"""What llama.cpp's converter makes of each family's config and tensors (convert_hf_to_gguf.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = {
    "llama": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "gpt_oss": "GPT_OSS",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "granite": "GRANITE",
}
"""By the model type of a config: the name in `gguf.MODEL_ARCH`."""
_INTERLEAVED = ("llama", "granite")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def add_family_config(writer: Any, config: Mapping[str, Any]) -> None:
    """What a llama's config doesn't say."""
    kind = config["model_type"]
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind in ("gpt_oss", "gemma3_text", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or config["max_position_embeddings"])
    if kind == "gemma3_text":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if kind == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())


def converted(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they are stored in GGUF files, by names that `gguf`'s map of names knows."""
    kind = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        expert, module = _EXPERT.fullmatch(name), name.split(".")[-2]
        if expert:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", []).append(tensor)
        elif kind == "gpt_oss":
            yield from _of_gpt_oss(name, tensor)
        elif kind in _INTERLEAVED and module in heads:
            yield name, _interleave_halves(tensor, heads[module])
        elif kind == "gemma3_text" and name.endswith("norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor.squeeze()
    yield from ((name, torch.stack(each)) for name, each in experts.items())


def _of_gpt_oss(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gate and up are stored in turn elsewhere, and apart here."""
    stem, _, last = name.rpartition(".")
    if last in ("gate_up_proj", "gate_up_proj_bias"):
        stored = tensor.transpose(1, 2) if tensor.ndim > 2 else tensor
        kind = "bias" if last.endswith("bias") else "weight"
        yield f"{stem}.gate_proj.{kind}", stored[:, ::2].contiguous()
        yield f"{stem}.up_proj.{kind}", stored[:, 1::2].contiguous()
    elif last == "down_proj":
        yield f"{stem}.down_proj.weight", tensor.transpose(1, 2).contiguous()
    elif last == "down_proj_bias":
        yield f"{stem}.down_proj.bias", tensor
    else:
        yield f"{name}.weight" if last == "sinks" else name, tensor


def _interleave_halves(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
