"""GGUF's metadata and tensor names, said in the words of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core import CheckpointError
from core_plugin_gguf.vocabulary import Vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PERMUTED = ("llama",)
"""Families whose q and k rows GGUF stores with each head's two halves interleaved."""

Factors = npt.NDArray[np.float32]
ROPE_FACTORS = "rope_freqs.weight"

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

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""How to draw from the model, as its makers advise: of llama.cpp's keys `general.sampling` those that core draws by."""

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


def hub_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` of `blk.0.attn_q.weight`; a name that isn't known stays itself."""
    stem, _, kind = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
    return name


class Metadata:
    """The metadata of one file, asked for by the architecture's own keys. Raises CheckpointError for what lacks."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self.file = file
        self.architecture = str(self._of_all("general.architecture"))

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._number(key, default)
        if not isinstance(value, int):
            raise CheckpointError(f"{self.file} says that its {key} is {value}", hint="convert the model again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return float(self._number(key, default))

    def get(self, key: str) -> Any:
        """What it says; a list whose values are all the same says that value."""
        value = self._values.get(f"{self.architecture}.{key}")
        return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value

    def sampling(self) -> dict[str, Any]:
        """The advice on how to draw that it has, in the words of generation_config.json."""
        said = {name: self._values.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def parts(self) -> int:
        """The number of files that the model is split into."""
        return int(self._values.get("split.count", 0)) or 1

    def _of_all(self, key: str) -> Any:
        if key not in self._values:
            raise CheckpointError(f"{self.file} does not say its {key}", hint="convert the model again")
        return self._values[key]

    def _number(self, key: str, default: float | None) -> int | float:
        value = self.get(key)
        if value is None:
            value = self._of_all(f"{self.architecture}.{key}") if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.file} says that its {key} is {value}", hint="convert the model again")
        return value


def read_config(
    metadata: Metadata, vocabulary: Vocabulary, shapes: Mapping[str, Sequence[int]], rope_factors: Factors | None
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
    config = {
        "model_type": metadata.architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, hidden_size // heads),
        "intermediate_size": metadata.count("feed_forward_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, rope_theta, rope_factors),
        "max_position_embeddings": metadata.count("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "bos_token_id": vocabulary.id_of("bos"),
        "eos_token_id": vocabulary.id_of("eos"),
    }
    if metadata.architecture in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if metadata.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    return config


def read_generation_config(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        **metadata.sampling(),
        "bos_token_id": vocabulary.id_of("bos"),
        "eos_token_id": vocabulary.ends(),
        "pad_token_id": vocabulary.id_of("padding"),
    }


def _refuse_unsupported(metadata: Metadata, tensors: Iterable[str]) -> None:
    if metadata.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{metadata.file} holds a model of the architecture {metadata.architecture!r}",
            hint=f"GGUF is read for {', '.join(ARCHITECTURES)}; use the model's safetensors",
        )
    if metadata.get("expert_count"):
        raise CheckpointError(f"{metadata.file} holds a mixture of experts, which is not read from GGUF")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(key), tuple):
            raise CheckpointError(f"the layers of {metadata.file} differ in their {key}, which is not supported")
    for key, neutral in NEUTRAL.items():
        value = metadata.get(key)
        if value is not None and value not in neutral:
            raise CheckpointError(
                f"{metadata.file} says that its {key} is {value}",
                f"that makes it another model than a {metadata.architecture} that is computed here",
                "use the model's safetensors",
            )
    window = metadata.get("attention.sliding_window")
    if window and window < metadata.count("context_length"):
        raise CheckpointError(f"{metadata.file} attends to the last {window} tokens alone, which is not read from GGUF")
    unknown = next((name for name in tensors if hub_name(name) == name and name != ROPE_FACTORS), None)
    if unknown is not None:
        raise CheckpointError(
            f"{metadata.file} has a tensor {unknown}",
            f"a {metadata.architecture} that is computed here has none",
            "use the model's safetensors",
        )


def _head_dim(metadata: Metadata, usual: int) -> int:
    head_dim = metadata.count("attention.key_length", metadata.get("rope.dimension_count") or usual)
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.count(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{metadata.file} has {key} {metadata.get(key)} and heads of {head_dim}",
                "heads that are rotated in part, or whose values differ from their keys, are not supported",
            )
    return head_dim


def _rope_scaling(metadata: Metadata, rope_theta: float, factors: Factors | None) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type") or "linear"
    # llama.cpp's older converters wrote the factor by another key, and no type.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{metadata.file} scales its positions by {kind!r}", hint="linear and yarn are read")
    if kind != "yarn" and attention != 1:
        raise CheckpointError(f"{metadata.file} has rope.scaling.attn_factor {attention}", hint="yarn alone has one")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1)
    if factors is not None and scaled:
        raise CheckpointError(f"{metadata.file} scales its positions twice", hint="use the model's safetensors")
    if factors is not None:
        return _llama3_scaling(metadata.file, rope_theta, factors)
    if kind == "yarn":
        return _yarn_scaling(metadata, attention)
    return {"rope_type": "linear", "factor": factor} if scaled else None


def _yarn_scaling(metadata: Metadata, attention: float) -> dict[str, Any]:
    """llama.cpp multiplies the attention factor that YaRN's authors have by two of the file's own."""
    factor = metadata.number("rope.scaling.factor")
    attention *= metadata.number("rope.scaling.yarn_attn_factor", 1.0)
    betas = {beta: metadata.get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    said = {beta: value for beta, value in betas.items() if value is not None}
    if attention != 1:
        said["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    context = metadata.count("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", context),
        **said,
    }


def _llama3_scaling(file: str, rope_theta: float, factors: Factors) -> dict[str, Any]:
    """The parameters that a converter made `factors` from (rope_type llama3 of transformers).

    Every published model has a low_freq_factor of 1 and a high_freq_factor of 4, so that one number remains: the
    original context length, which each frequency between the two bounds gives away.
    """
    factor = float(factors.max())
    between = (factors > 1) & (factors < factor)
    turns = rope_theta ** (-np.arange(len(factors)) / len(factors)) / (2 * np.pi)
    if between.any():
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        context = round(float(np.median((3 * smooth + 1) / turns[between])))
        smooth = np.clip((context * turns - 1) / 3, 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise CheckpointError(
        f"{file} scales its positions by factors of its own",
        f"{ROPE_FACTORS} is not what Llama 3 models have",
        "use the model's safetensors",
    )
