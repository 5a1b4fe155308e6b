"""From a checkpoint's tensors to a stack of layers, or to the coordinator's ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from core import GroupedLinear, Weights
from core_plugin_transformers import config as configs
from core_plugin_transformers.experts import PackedExperts
from core_plugin_transformers.names import Recipe
from core_plugin_transformers.packed import PackedEmbedding, PackedLinear
from core_plugin_transformers.skeleton import Skeleton
from core_plugin_transformers.spec import TransformersSpec, name_of
from core_plugin_transformers.stack import ModelEnds, Stack


def build_stack(spec: TransformersSpec, layers: range, weights: Weights) -> Stack:
    skeleton = Skeleton(configs.read(spec.config), weights.dtype)
    skeleton.leave_out([layer for layer in range(spec.layers) if layer not in layers], spec.reply)
    values, modules = _read([recipe for layer in layers for recipe in spec.by_layer[layer]], skeleton, weights)
    _place(skeleton, values, modules, weights)
    return Stack(skeleton, layers)


def build_embed_and_head(spec: TransformersSpec, weights: Weights) -> ModelEnds:
    skeleton = Skeleton(configs.read(spec.config), weights.dtype)
    skeleton.leave_out(range(spec.layers), spec.reply)
    values, modules = _read(spec.non_layer, skeleton, weights)
    if spec.tied_head:
        _tie(skeleton.model, values, modules)
    _place(skeleton, values, modules, weights)
    return ModelEnds(skeleton, weights.device)


def _read(
    wanted: Iterable[Recipe], skeleton: Skeleton, weights: Weights
) -> tuple[dict[str, Tensor], dict[str, nn.Module]]:
    """The parameters of `wanted` and the packed modules among them, by their names in the model."""
    values: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    experts: dict[str, dict[str, GroupedLinear]] = {}
    for recipe in wanted:
        module, source = recipe.target.removesuffix(".weight"), recipe.sources[0][1]
        if recipe.linear:
            linear = weights.linear(source.removesuffix(".weight"))
            modules[module] = PackedLinear(linear, skeleton.model.get_submodule(module))
        elif recipe.embedding:
            modules[module] = PackedEmbedding(weights.embedding(source))
        elif recipe.experts:
            module, _, projection = recipe.target.rpartition(".")
            experts.setdefault(module, {})[projection] = weights.experts(*recipe.experts, bias=recipe.bias)
        else:
            values.update(recipe.read(weights, skeleton.model))
    for module, projections in experts.items():
        modules[module] = PackedExperts(skeleton.model.get_submodule(module), projections)
    return values, modules


def _tie(model: Any, values: dict[str, Tensor], modules: dict[str, nn.Module]) -> None:
    head, embedding = model.get_output_embeddings(), name_of(model, model.get_input_embeddings())
    table = modules.get(embedding)
    if isinstance(table, PackedEmbedding):
        modules[name_of(model, head)] = PackedLinear(table.packed, head)
    else:
        values[f"{name_of(model, head)}.weight"] = values[f"{embedding}.weight"]


def _place(skeleton: Skeleton, values: dict[str, Tensor], modules: dict[str, nn.Module], weights: Weights) -> None:
    """Packed modules come last: the family's own code, which computes the buffers, expects its own modules."""
    skeleton.fill(values, weights.device)
    for name, module in modules.items():
        skeleton.model.set_submodule(name, module)
