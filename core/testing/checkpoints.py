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


def tiny_checkpoint(
    directory: Path,
    *,
    model_type: Literal["llama", "qwen2"] = "llama",
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
) -> Path:
    """Saves a small random model with its tokenizer to `directory`, as Hugging Face would, and returns it.

    The weights follow from `seed` alone and are scaled so that logits differ by a few units; norms and
    biases are not at their neutral values, so that leaving one out is noticed. The tokenizer is a byte-level
    BPE with `<|im_start|>`, `<|im_end|>` (which ends a turn) and `<|endoftext|>`, and a ChatML template: any
    text survives encoding and decoding.

    `vocab` is at least 259 (256 bytes and the three special tokens). `rope_scaling` is in the words of a
    config.json, without rope_theta. `attention_bias` is for llama; qwen2 has its biases in any case. With
    `shards` above 1, tensors are spread in order over as many files, with an index.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab, max_position_embeddings)
    tokenizer.save_pretrained(directory)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden_size // heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.convert_tokens_to_ids(IM_START),
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **(rope_scaling or {})},
        dtype=dtype,
        **({} if attention_bias is None else {"attention_bias": attention_bias}),
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=[config.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random_tensor(name, parameter.shape, generator).to(dtype) for name, parameter in model.named_parameters()
    }
    _save_sharded(weights, directory, shards)
    return directory


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


def _random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if name.endswith(".bias"):
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
