"""A checkpoint's config as transformers reads it, and what is not a decoder that can be split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import ConfigError

ENDLESS = 131_072
"""Tokens of context that are assumed of a model whose config names no bound."""

MAX_LAYERS = 10_000
"""More are refused before a module is made for each."""
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def is_known(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def read(config: Mapping[str, Any]) -> Any:
    """The PreTrainedConfig of the text decoder. Raises ConfigError where there is none to split.

    Code that comes with a checkpoint is never run. A quantization_config is left out: the tensors of a checkpoint
    arrive as floating-point numbers, or are refused where they are read.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if any(isinstance(count := config.get(key), int) and count > MAX_LAYERS for key in _LAYER_COUNTS):
        raise ConfigError(f"the config of this {kind} model has more than {MAX_LAYERS} layers")
    _refuse_what_is_no_decoder(config)
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        family = CONFIG_MAPPING[kind]
        read = family.from_dict(family._decode_special_floats(kept))
    # A config class may raise anything at values that it can't use.
    except Exception as error:
        raise ConfigError(f"transformers can't read the config of this {kind} model", str(error)) from error
    if getattr(read, "index_topk", None):
        raise ConfigError(
            f"{kind} attends to the positions that an index picks",
            "transformers' index picks from the future of a prompt, so a prompt's logits depend on how it is cut",
        )
    return read


def _refuse_what_is_no_decoder(config: Mapping[str, Any]) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    kind = config["model_type"]
    hint = "models that continue a text can be served: see docs/families.md"
    known = CONFIG_MAPPING[kind]
    if config.get("is_encoder_decoder", getattr(known, "is_encoder_decoder", False)):
        raise ConfigError(f"{kind} is an encoder and a decoder", "only decoders can be split here", hint)
    if kind in ENCODERS and "decoder" not in kind and not config.get("is_decoder"):
        raise ConfigError(f"{kind} is an encoder: it continues no text", "", hint)
    name = DECODERS.get(kind)
    if name is None and "vision_config" in getattr(known, "sub_configs", {}):
        raise ConfigError(f"{kind} reads images", "only models of text alone can be split here", hint)
    if name is None:
        raise ConfigError(f"{kind} is no language model that transformers can split", "", hint)
    if name.endswith("ForConditionalGeneration"):
        raise ConfigError(
            f"{kind} reads more than text", "only models of text alone can be split here", "use its text-only model"
        )


def context_length(config: Any) -> int:
    for key in ("max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return int(value)
    return ENDLESS


def kv_width(config: Any) -> int:
    """Values that a token leaves in the cache of a layer with that config, as most families have them."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):
        return heads * int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    if heads == 0:
        return 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * int(getattr(config, "num_key_value_heads", None) or heads) * int(head_dim)
