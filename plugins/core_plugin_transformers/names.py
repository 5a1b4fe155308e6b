"""Which tensors of a checkpoint make which parameter of transformers' model.

transformers renames and fuses tensors as it loads (its "weight conversions": experts become one tensor, old names
new ones). Its own rules are applied here, to one layer at a time.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from core import TensorInfo, TensorSpec, Weights
from core_plugin_transformers.experts import are_experts, names_by_expert, projection_names

_Sources = dict[str, tuple[Any, list[tuple[str, str]]]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one parameter (or what one conversion gives) comes from the checkpoint.

    `sources` are pairs of the conversion's pattern and a checkpoint's name. Weights of `linear` and `embedding` are
    packed, and those of `experts`, which has their names as `Weights.experts` wants them, with `bias`.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    conversion: Any
    specs: tuple[TensorSpec, ...]
    linear: bool = False
    embedding: bool = False
    experts: tuple[tuple[str, ...], ...] = ()
    bias: str | None = None

    def read(self, weights: Weights, model: Any) -> dict[str, Tensor]:
        """The parameters by their names in `model`."""
        if self.conversion is None:
            return {self.target: weights.tensor(self.sources[0][1])}
        return weights.made([name for _, name in self.sources], partial(self._convert, model))

    def _convert(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        conversion = deepcopy(self.conversion)
        for pattern, name in self.sources:
            conversion.add_tensor(self.target, name, pattern, tensors[name])
        made = conversion.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(model: Any, tensors: Mapping[str, TensorInfo], layer_prefix: str) -> list[Recipe]:
    """What makes every parameter of `model`, which is on the meta device, in the order of the model's own.

    A parameter that nothing in `tensors` makes has a recipe all the same: it names the tensor that is missing.
    """
    state = model.state_dict()
    sources = _sources(model, state, tensors, get_model_conversion_mapping(model))
    packable = _packable(model, layer_prefix)
    in_fp32 = _fp32_test(model, state)
    grouped = {
        recipe.target: recipe
        for path, module in packable.items()
        if are_experts(module)
        for recipe in _experts(path, module, sources, state, in_fp32)
    }
    found: list[Recipe] = []
    made: set[str] = set()
    for target in state:
        if target in made or target not in sources:
            continue
        conversion, pairs = sources[target]
        module = target.removesuffix(".weight")
        names = [name for _, name in pairs]
        if target in grouped:
            recipe = grouped[target]
        elif conversion is None and module in packable and not in_fp32(target) and names[0].endswith(".weight"):
            recipe = _packed(module, names[0], f"{module}.bias" in sources, packable[module], state)
        else:
            shapes = {name: state[target].shape if conversion is None else tensors[name].shape for name in names}
            specs = tuple(TensorSpec(name, tuple(shape), fp32=in_fp32(target)) for name, shape in shapes.items())
            recipe = Recipe(target, tuple(pairs), conversion, specs)
        found.append(recipe)
        made.update(_made_by(recipe))
    return found + [_missing(name, state[name]) for name in state if name not in made and _is_needed(model, name)]


def _packed(module: str, name: str, biased: bool, like: nn.Module, state: Mapping[str, Tensor]) -> Recipe:
    target, linear = f"{module}.weight", isinstance(like, nn.Linear)
    specs = [TensorSpec(name, tuple(state[target].shape), packed=linear, embedding=not linear)]
    if linear and biased:
        specs.append(TensorSpec(f"{name.removesuffix('.weight')}.bias", tuple(state[f"{module}.bias"].shape)))
    return Recipe(target, ((name, name),), None, tuple(specs), linear, not linear)


def _experts(
    path: str, like: Any, sources: _Sources, state: Mapping[str, Tensor], in_fp32: Callable[[str], bool]
) -> list[Recipe]:
    """What makes the projections of experts; nothing where one of them can't be packed."""
    found: list[Recipe] = []
    for target in (f"{path}.{name}" for name in projection_names(like)):
        conversion, pairs = sources.get(target, (None, []))
        names = names_by_expert(conversion, pairs, len(state[target]), like.is_transposed)
        biases = [name for _, name in sources.get(f"{target}_bias", (None, []))[1]]
        if not names or len(biases) != int(like.has_bias) or in_fp32(target):
            return []
        experts, rows, columns = state[target].shape
        shape = (experts, rows, columns) if conversion is None else (rows // len(names), columns)
        specs = [TensorSpec(name, shape, packed=True, transposed=like.is_transposed) for each in names for name in each]
        specs += [TensorSpec(name, tuple(state[f"{target}_bias"].shape)) for name in biases]
        found.append(
            Recipe(target, tuple(pairs), conversion, tuple(specs), experts=names, bias=next(iter(biases), None))
        )
    return found


def _sources(model: Any, state: Mapping[str, Tensor], names: Iterable[str], conversions: list[Any]) -> _Sources:
    """By parameter: the conversion that makes it, and the tensors that it is made of (transformers' own matching)."""
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: _Sources = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target in state:
            conversion = by_pattern[pattern] if pattern is not None else None
            sources.setdefault(target, (conversion, []))[1].append((pattern or name, name))
    return sources


def _made_by(recipe: Recipe) -> set[str]:
    if recipe.linear:
        return {recipe.target, f"{recipe.target.removesuffix('.weight')}.bias"}
    if recipe.experts:
        return {recipe.target, f"{recipe.target}_bias"}
    if recipe.conversion is None:
        return {recipe.target}
    first, *others = recipe.conversion.target_patterns
    return {recipe.target, *(recipe.target.replace(first, other) for other in others)}


def _missing(name: str, empty: Tensor) -> Recipe:
    return Recipe(name, ((name, name),), None, (TensorSpec(name, tuple(empty.shape)),))


def _is_needed(model: Any, name: str) -> bool:
    optional = model._keys_to_ignore_on_load_missing or ()
    return name not in model.all_tied_weights_keys and not any(re.search(pattern, name) for pattern in optional)


def _fp32_test(model: Any, state: Mapping[str, Tensor]) -> Callable[[str], bool]:
    """Whether a parameter is held in float32 whatever the compute dtype: the family's code says so in two ways."""
    kept = list(model._get_dtype_plan(torch.float16))
    pattern = build_glob_alternation(kept)[0] if kept else None
    return lambda name: state[name].dtype is torch.float32 or bool(pattern and pattern.search(name))


def _packable(model: Any, layer_prefix: str) -> dict[str, nn.Module]:
    """The layers' linear modules and experts, the head and the embedding, but for those whose weights the family's
    code touches.

    An embedding is packed only with a head that can be tied to what is packed.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found: dict[str, nn.Module] = {}
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            path = f"{name}.{child}".removeprefix(".")
            linear = type(module) is nn.Linear and (module is head or path.startswith(layer_prefix))
            embeds = type(module) is nn.Embedding and module is embedding
            experts = are_experts(module) and path.startswith(layer_prefix)
            if (linear or embeds or experts) and not _touched(child, module, type(parent)):
                found[path] = module
    if head.bias is not None or head not in found.values():
        return {path: module for path, module in found.items() if module is not embedding}
    return found


def _touched(child: str, module: nn.Module, parent: type) -> bool:
    parameters = "|".join(module._parameters)
    return re.search(rf"\.{re.escape(child)}\.({parameters})\b", _source(parent)) is not None


@cache
def _source(kind: type) -> str:
    """The family's code around `kind`: without strings, and without what it only does to weights that are new."""
    if kind.__module__.startswith("torch."):
        return ""
    source = re.sub(r'"[^"\n]*"', '""', inspect.getsource(sys.modules[kind.__module__]))
    return re.sub(r"\n    def _init_weights\(.*?(?=\n    def |\n    @|\n\n\n|$)", "", source, flags=re.DOTALL)
