"""GGUF's metadata, said in the words of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core import CheckpointError
from core_plugin_gguf.families import FAMILIES, Family
from core_plugin_gguf.metadata import Metadata
from core_plugin_gguf.names import FACTORS, hub_name
from core_plugin_gguf.rope import Factors, rope_scaling
from core_plugin_gguf.vocabulary import Vocabulary

_ABSENT = """
attention.clamp_kqv attention.max_alibi_bias attention.scale attention.q_lora_rank attention.kv_lora_rank
attention.key_length_mla attention.value_length_mla attention.key_length_swa attention.value_length_swa
attention.shared_kv_layers attention.sliding_window_pattern attention.temperature_length attention.temperature_scale
attention.output_scale attn_logit_softcapping final_logit_softcapping router_logit_softcapping use_parallel_residual
swin_norm nextn_predict_layers n_deepstack_layers rope.dimension_sections rope.dimension_count_swa rope.freq_base_swa
rope.scaling.alpha rope.scaling.yarn_log_multiplier swiglu_clamp_exp swiglu_clamp_shexp activation_sparsity_scale
full_attention_interval interleave_moe_layer_step embedding_length_per_layer_input decoder_block_count
altup.num_inputs ssm.state_size
"""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ABSENT.split(), (0, False)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
"""Keys of llama.cpp (src/llama-arch.cpp) that change what a model computes, each with what leaves it as it is here."""


def read_config(
    metadata: Metadata, vocabulary: Vocabulary, shapes: Mapping[str, Sequence[int]], rope_factors: Factors
) -> dict[str, Any]:
    """The file's config.json; `shapes` are those of its tensors.

    Raises CheckpointError for a file that can't be read here, saying what can.
    """
    _refuse_unsupported(metadata, shapes)
    heads = metadata.count("attention.head_count")
    hidden_size = metadata.count("embedding_length")
    rope_theta = metadata.number("rope.freq_base", 10000.0)
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.file} has no token_embd.weight", hint="use a file of the whole model")
    family = FAMILIES[metadata.architecture]
    return {
        "model_type": family.model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, hidden_size // heads, family),
        "intermediate_size": metadata.count("feed_forward_length", hidden_size if family.experts else None),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling(metadata, rope_theta, rope_factors),
        "max_position_embeddings": metadata.count("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "bos_token_id": vocabulary.id_of("bos"),
        "eos_token_id": vocabulary.id_of("eos"),
        **family.more(metadata, shapes),
    }


def read_generation_config(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        **metadata.sampling(),
        "bos_token_id": vocabulary.id_of("bos"),
        "eos_token_id": vocabulary.ends(),
        "pad_token_id": vocabulary.id_of("padding"),
    }


def _refuse_unsupported(metadata: Metadata, tensors: Iterable[str]) -> None:
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise CheckpointError(
            f"{metadata.file} holds a model of the architecture {metadata.architecture!r}",
            hint=f"GGUF is read for {', '.join(FAMILIES)}; use the model's safetensors",
        )
    if metadata.get("expert_count") and not family.experts:
        raise CheckpointError(
            f"{metadata.file} holds a mixture of experts",
            f"one of the architecture {metadata.architecture!r} is not read from GGUF",
            "use the model's safetensors",
        )
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(key), tuple):
            raise CheckpointError(f"the layers of {metadata.file} differ in their {key}, which is not supported")
    for key, neutral in NEUTRAL.items():
        value = metadata.get(key)
        if key not in family.keys and value is not None and value not in neutral:
            raise CheckpointError(
                f"{metadata.file} says that its {key} is {value}",
                f"that makes it another model than a {metadata.architecture} that is computed here",
                "use the model's safetensors",
            )
    window = metadata.get("attention.sliding_window")
    if window and window < metadata.count("context_length") and "attention.sliding_window" not in family.keys:
        raise CheckpointError(f"{metadata.file} attends to the last {window} tokens alone, which is not read from GGUF")
    named = (name for name in tensors if name not in FACTORS)
    unknown = next((name for name in named if hub_name(name, metadata.architecture) == name), None)
    if unknown is not None:
        raise CheckpointError(
            f"{metadata.file} has a tensor {unknown}",
            f"a {metadata.architecture} that is computed here has none",
            "use the model's safetensors",
        )


def _head_dim(metadata: Metadata, usual: int, family: Family) -> int:
    rotated = "rope.dimension_count"
    head_dim = metadata.count(
        "attention.key_length", usual if rotated in family.keys else metadata.get(rotated) or usual
    )
    for key in (rotated, "attention.value_length"):
        if key not in family.keys and metadata.count(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{metadata.file} has {key} {metadata.get(key)} and heads of {head_dim}",
                "heads that are rotated in part, or whose values differ from their keys, are not supported",
            )
    return head_dim
