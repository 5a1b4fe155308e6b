"""What transformers says of a model, in core's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from core import CacheSize, ConfigError, ModelSpec, TensorInfo
from core_plugin_transformers import config as configs
from core_plugin_transformers.names import Recipe, recipes
from core_plugin_transformers.session import has_state
from core_plugin_transformers.sizes import cache_sizes
from core_plugin_transformers.skeleton import Skeleton, probe


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """`by_layer` makes each layer's parameters; the first layer's include what runs before it.

    `non_layer` makes the rest. `reply` is the form of a layer's result. `caches` is what each layer keeps.
    """

    by_layer: tuple[tuple[Recipe, ...], ...]
    non_layer: tuple[Recipe, ...]
    reply: int
    caches: tuple[CacheSize, ...]


def read_spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> TransformersSpec:
    skeleton = Skeleton(configs.read(config), torch.bfloat16)
    _refuse_the_odd(skeleton)
    own, count, prefix = skeleton.config, len(skeleton.layers), skeleton.prefix
    found = recipes(skeleton.model, tensors, prefix)
    outer = [recipe for recipe in found if not recipe.target.startswith(prefix)]
    layers = [[recipe for recipe in found if recipe.target.startswith(f"{prefix}{n}.")] for n in range(count)]
    tied = _is_tied(skeleton.model, outer)
    cached = DynamicCache(config=own).layers
    reply, before = probe(skeleton)
    caches = cache_sizes(skeleton)
    early = [recipe for recipe in outer if recipe.target.rpartition(".")[0] in before]
    return TransformersSpec(
        architecture="transformers",
        layers=count,
        hidden_size=int(own.hidden_size),
        vocab_size=int(own.vocab_size),
        context_length=configs.context_length(own),
        kv_width=max(size.token_values for size in caches),
        tied_head=tied,
        config=config,
        can_truncate=not any(map(has_state, cached)),
        by_layer=tuple(tuple(early * (n == 0) + layer) for n, layer in enumerate(layers)),
        non_layer=tuple(recipe for recipe in outer if recipe not in early),
        reply=reply,
        caches=caches,
    )


def name_of(model: Any, wanted: Any) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _is_tied(model: Any, outer: list[Recipe]) -> bool:
    """Whether the head has no tensor of its own."""
    head = f"{name_of(model, model.get_output_embeddings())}.weight"
    return head in model.all_tied_weights_keys and all(recipe.target != head for recipe in outer)


def _refuse_the_odd(skeleton: Skeleton) -> None:
    kind, hidden = skeleton.config.model_type, int(skeleton.config.hidden_size)
    head, table = skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings()
    if skeleton.cache_argument is None:
        raise ConfigError(f"{kind} can't be split", "it keeps its state in another way than transformers' caches")
    if head is None or not hasattr(table, "weight"):
        raise ConfigError(f"{kind} can't be split", "it has no embedding or no head of its own")
    if table.weight.shape[1] != hidden:
        raise ConfigError(f"{kind} with embeddings of {table.weight.shape[1]} values can't be split", f"not {hidden}")
