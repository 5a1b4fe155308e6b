"""Tiny checkpoints with all that real ones have: weights, a tokenizer for any text, a chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = (
    "The layers of one model lie on several machines, and each machine computes its own layers in turn.",
    "A token enters at the first layer, passes through all the others, and leaves as a row of numbers.",
    "When a machine goes away, its layers are loaded by another, and the text goes on where it was.",
)


DenseType = Literal["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"]
MixtureType = Literal["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"]
ModelType = Literal[DenseType, MixtureType]

_LATENT: dict[str, Any] = {
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}
_OF_LATENTS = ("deepseek_v2", "deepseek_v3")
_TINY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "gemma2": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "deepseek_v2": {
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16, "swiglu_limit": 1.5},
}
"""What a family's config says where `config` says nothing: windows and caps that a short text reaches."""


def tiny_checkpoint(
    directory: Path,
    *,
    model_type: str = "llama",
    seed: int = 0,
    layers: int = 6,
    hidden_size: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 320,
    tied: bool = True,
    attention_bias: bool | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    max_position_embeddings: int = 512,
    endless: bool = False,
    fused_experts: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Saves a small random model with its tokenizer to `directory`, as Hugging Face would, and returns it.

    `model_type` is a ModelType, or another decoder family of transformers whose config has the usual names.

    The weights follow from `seed` alone and are scaled so that logits differ by a few units; norms and
    biases are not at their neutral values, so that leaving one out is noticed. The tokenizer is a byte-level
    BPE with `<|im_start|>`, `<|im_end|>` (which ends a turn) and `<|endoftext|>`, and a ChatML template: any
    text survives encoding and decoding.

    `vocab` is at least 259 (256 bytes and the three special tokens). `rope_scaling` is in the words of a
    config.json, without rope_theta; of gemma3 it is for the layers without a window. `attention_bias` is for families
    that leave it to the config. `config` is what config.json says beside all that. With `shards` above 1, tensors are
    spread in order over as many files, with an index. An `endless` one never prefers a special token, so that greedy
    decoding ends at its bound alone. Experts are one tensor each, as published, or with `fused_experts` all in one, as
    transformers holds them.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab, max_position_embeddings)
    tokenizer.save_pretrained(directory)
    saved = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.convert_tokens_to_ids(IM_START),
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        dtype=dtype,
        **({} if attention_bias is None else {"attention_bias": attention_bias}),
        **{
            "num_key_value_heads": heads if model_type in _OF_LATENTS else kv_heads,
            "head_dim": head_dim or hidden_size // heads,
            "rope_parameters": _rope_parameters(model_type, rope_scaling),
            **_TINY.get(model_type, {}),
            **(config or {}),
        },
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(saved)
    saved.architectures = [type(model).__name__]
    saved.save_pretrained(directory)
    transformers.GenerationConfig(
        bos_token_id=saved.bos_token_id,
        eos_token_id=[saved.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if model_type in ("gemma2", "gemma3_text") else 1.0
    weights = {
        name: _random_tensor(name, parameter.shape, neutral, generator).to(dtype)
        for name, parameter in (*model.named_parameters(), *_saved_buffers(model))
    }
    if endless:
        weights["model.embed_tokens.weight" if tied else "lm_head.weight"][tokenizer.all_special_ids] = 0
    _save_sharded(weights if fused_experts else _as_published(model, weights), directory, shards)
    return directory


def _saved_buffers(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]


def _as_published(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what transformers fuses as it loads."""
    from transformers.core_model_loading import revert_weight_conversion

    published = revert_weight_conversion(model, weights)
    return {name: tensor.contiguous() for name, tensor in published.items()}


def _rope_parameters(model_type: str, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    scaled = {"rope_type": "default", "rope_theta": 10000.0, **(scaling or {})}
    if model_type != "gemma3_text":
        return scaled
    return {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


def _tokenizer(vocab: int, context_length: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, IM_START, IM_END],
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHATML,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def _random_tensor(name: str, shape: torch.Size, neutral: float, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return neutral + 0.1 * values
    if name.endswith("bias"):
        return 0.5 * values
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0.3 * values
    return 1.5 / math.sqrt(shape[-1]) * values


def _save_sharded(weights: Mapping[str, Tensor], directory: Path, shards: int) -> None:
    from safetensors.torch import save_file

    if shards == 1:
        save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in weights.values())
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    held: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    done = 0
    for name, tensor in weights.items():
        held[files[done * shards // total]][name] = tensor
        done += tensor.nbytes
    for file, tensors in held.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, tensors in held.items() for name in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_gguf(directory: Path, path: Path, quant: str = "F16", *, part_tensors: int = 0) -> Path:
    """Converts a tiny checkpoint to a GGUF file as llama.cpp's converter would; returns `path`.

    With `part_tensors`, a file holds so many tensors, and there are as many files as that takes: then it is the first
    one's path, `path`'s name with -00001-of-00003 and so on, that is returned.

    `quant` is the type of the matrices: `F32`, `F16`, `BF16`, or one that `gguf.quants` can make, such as `Q8_0`,
    `Q5_0`, `Q4_1`, `Q4_0` and `MXFP4`. Vectors, routers and biases stay in F32. Of llama, the rows of q and k change
    places, and the frequencies of the rope type llama3 become factors; linear and yarn become metadata.
    """
    import gguf

    from core.testing.gguf_families import ARCHITECTURES, converted

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=part_tensors)
    _add_config(writer, config)
    _add_tokenizer(writer, directory, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in converted(config, _load(directory)):
        values = tensor.float().numpy()
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        plain = values.ndim == 1 or name.endswith("bias") or "ffn_gate_inp" in stored_name
        kind = gguf.GGMLQuantizationType["F32" if plain else quant]
        writer.add_tensor(stored_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if len(writer.tensors) == 1 else path.with_stem(f"{path.stem}-00001-of-{len(writer.tensors):05d}")


def _load(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    from gguf import RopeScalingType

    from core.testing.gguf_families import add_family_config

    add_family_config(writer, config)
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim).numpy())


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """What each frequency is divided by (Llama 3.1; rope_type llama3 of transformers)."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    frequencies = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()


def _add_tokenizer(writer: Any, directory: Path, config: Mapping[str, Any]) -> None:
    from gguf import TokenType

    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text(encoding="utf-8"))
