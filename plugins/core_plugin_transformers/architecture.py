"""The architecture: what transformers says of a family, in core's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from core import Architecture, ConfigError, Ends, LayerStack, ModelSpec, TensorInfo, TensorSpec, Weights
from core_plugin_transformers import config as configs
from core_plugin_transformers.names import Recipe, recipes


@dataclass(frozen=True, slots=True)
class TransformersSpec(ModelSpec):
    """`by_layer` makes each layer's parameters; the first layer's include what runs before it. `ends` makes the rest.

    `reply` is the form of a layer's result.
    """

    by_layer: tuple[tuple[Recipe, ...], ...]
    ends: tuple[Recipe, ...]
    reply: int


class Transformers(Architecture):
    """Any decoder that transformers knows, of a family that has no architecture of its own here.

    transformers is imported when a config is looked at that no other architecture takes.
    """

    name = "transformers"
    model_types = ()

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return configs.is_known(config.get("model_type"))

    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        return self.read_model(config, {})

    def read_model(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelSpec:
        import torch
        from transformers import DynamicCache
        from transformers.cache_utils import CacheLayerMixin

        from core_plugin_transformers.skeleton import Skeleton, probe

        read = configs.read(config)
        skeleton = Skeleton(read, torch.bfloat16)
        own, count = skeleton.config, len(skeleton.layers)
        _refuse_odd_embedding(skeleton)
        found = recipes(skeleton.model, tensors, skeleton.prefix)
        head = _head_name(skeleton.model)
        tied = head in skeleton.model.all_tied_weights_keys and all(recipe.target != head for recipe in found)
        prefix = skeleton.prefix
        reply, before = probe(skeleton)
        layers = [[recipe for recipe in found if recipe.target.startswith(f"{prefix}{n}.")] for n in range(count)]
        outer = [recipe for recipe in found if not recipe.target.startswith(prefix)]
        early = [recipe for recipe in outer if recipe.target.rpartition(".")[0] in before]
        caching = sum(isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=own).layers)
        return TransformersSpec(
            architecture=self.name,
            layers=count,
            hidden_size=int(own.hidden_size),
            vocab_size=int(own.vocab_size),
            context_length=configs.context_length(own),
            kv_width=configs.kv_width(own, caching),
            tied_head=tied,
            config=config,
            by_layer=tuple(tuple(early * (n == 0) + layer) for n, layer in enumerate(layers)),
            ends=tuple(recipe for recipe in outer if recipe not in early),
            reply=reply,
        )

    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        return _specs(_own(spec).by_layer[layer])

    def end_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return _specs(_own(spec).ends)

    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        from core_plugin_transformers.skeleton import Skeleton
        from core_plugin_transformers.stack import Stack

        skeleton = Skeleton(configs.read(spec.config), weights.dtype)
        skeleton.leave_out([n for n in range(spec.layers) if n not in layers], _own(spec).reply)
        skeleton.fill(_read([recipe for n in layers for recipe in _own(spec).by_layer[n]], skeleton, weights), weights.device)
        return Stack(skeleton, layers)

    def build_ends(self, spec: ModelSpec, weights: Weights) -> Ends:
        from core_plugin_transformers.linear import PackedLinear
        from core_plugin_transformers.skeleton import Skeleton
        from core_plugin_transformers.stack import ModelEnds

        skeleton = Skeleton(configs.read(spec.config), weights.dtype)
        skeleton.leave_out(range(spec.layers), _own(spec).reply)
        values = _read(_own(spec).ends, skeleton, weights)
        if spec.tied_head:
            head = skeleton.model.get_output_embeddings()
            table = values[f"{_name_of(skeleton.model, skeleton.model.get_input_embeddings())}.weight"]
            skeleton.model.set_output_embeddings(PackedLinear(weights.pack(table), head))
        skeleton.fill(values, weights.device)
        return ModelEnds(skeleton, weights.device)


def _read(wanted: Iterable[Recipe], skeleton: Any, weights: Weights) -> dict[str, Tensor]:
    """The parameters of `wanted`, one by one; packed linear layers take their places in the skeleton at once."""
    from core_plugin_transformers.linear import PackedLinear

    values: dict[str, Tensor] = {}
    for recipe in wanted:
        if recipe.packed:
            owner = recipe.target.removesuffix(".weight")
            packed = weights.linear(recipe.sources[0][1].removesuffix(".weight"))
            skeleton.model.set_submodule(owner, PackedLinear(packed, skeleton.model.get_submodule(owner)))
        else:
            values.update(recipe.read(weights, skeleton.model))
    return values


def _specs(wanted: Iterable[Recipe]) -> tuple[TensorSpec, ...]:
    return tuple(spec for recipe in wanted for spec in recipe.specs)


def _own(spec: ModelSpec) -> TransformersSpec:
    if not isinstance(spec, TransformersSpec):
        raise TypeError(f"{type(spec).__name__} is no spec of this architecture")
    return spec


def _refuse_odd_embedding(skeleton: Any) -> None:
    kind, hidden = skeleton.config.model_type, int(skeleton.config.hidden_size)
    head, table = skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings()
    if head is None or not hasattr(table, "weight"):
        raise ConfigError(f"{kind} can't be split", "it has no embedding or no head of its own")
    if table.weight.shape[1] != hidden:
        raise ConfigError(f"{kind} with embeddings of {table.weight.shape[1]} values can't be split", f"not {hidden}")


def _head_name(model: Any) -> str:
    return f"{_name_of(model, model.get_output_embeddings())}.weight"


def _name_of(model: Any, wanted: Any) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
