"""The tensors of a GGUF file, by the names that Hugging Face checkpoints have for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from core_plugin_gguf.header import StoredTensor

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are part of the config."""

_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_MIXTURE = {**_LAYER, **_EXPERTS, "ffn_gate_inp": "mlp.gate"}
_OF_FAMILY: Mapping[str, Mapping[str, str]] = {
    "phi3": {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        **_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "qwen3moe": _MIXTURE,
    "qwen2moe": {
        **_MIXTURE,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    },
    "gpt-oss": {
        **_MIXTURE,
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
}
_ROWS_OF_ONE = "ffn_gate_inp_shexp"
"""Stored as a vector, and a matrix of one row elsewhere."""


def hub_name(name: str, architecture: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` of `blk.0.attn_q.weight`; a name that isn't known stays itself.

    Of a tensor of all experts it is the one of each, with {} in the place of the expert's number.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    known = _OF_FAMILY.get(architecture, _LAYER).get(layer[2]) if layer else None
    if layer is None or known is None:
        return name
    if kind == "bias":
        known = known.replace(".{}", "")
    return f"model.layers.{layer[1]}.{known}" + ("" if known.endswith(".sinks") else f".{kind}")


def hub_tensors(name: str, at: StoredTensor, architecture: str) -> Iterator[tuple[str, StoredTensor]]:
    """What a stored tensor is elsewhere: a tensor, or each expert's part of it."""
    hub = hub_name(name, architecture)
    if "{}" not in hub:
        yield hub, replace(at, shape=(1, *at.shape)) if _ROWS_OF_ONE in name else at
        return
    experts, *shape = at.shape
    nbytes = at.nbytes // experts
    for expert in range(experts):
        yield hub.format(expert), replace(at, shape=tuple(shape), start=at.start + expert * nbytes, nbytes=nbytes)
