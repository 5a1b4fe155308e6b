"""The architecture. What needs transformers is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from core import Architecture, CacheSize, EmbedAndHead, LayerStack, ModelSpec, TensorInfo, TensorSpec, Weights
from core_plugin_transformers import config as configs

if TYPE_CHECKING:
    from core_plugin_transformers.spec import TransformersSpec


class Transformers(Architecture):
    """Any decoder that transformers knows, of a family that has no architecture of its own here."""

    name = "transformers"
    model_types = ()

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return configs.is_known(config.get("model_type"))

    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        return self.read_model(config, {})

    def read_model(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelSpec:
        from core_plugin_transformers.spec import read_spec

        return read_spec(config, tensors)

    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        return tuple(tensor for recipe in _own(spec).by_layer[layer] for tensor in recipe.specs)

    def non_layer_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return tuple(tensor for recipe in _own(spec).non_layer for tensor in recipe.specs)

    def layer_cache(self, spec: ModelSpec, layer: int) -> CacheSize:
        return _own(spec).caches[layer]

    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        from core_plugin_transformers.loading import build_stack

        return build_stack(_own(spec), layers, weights)

    def build_embed_and_head(self, spec: ModelSpec, weights: Weights) -> EmbedAndHead:
        from core_plugin_transformers.loading import build_embed_and_head

        return build_embed_and_head(_own(spec), weights)


def _own(spec: ModelSpec) -> TransformersSpec:
    return cast("TransformersSpec", spec)
