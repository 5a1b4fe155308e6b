"""Which tensors of a checkpoint make which parameter of transformers' model.

transformers renames and fuses tensors as it loads (its "weight conversions": experts become one tensor, old names
new ones). Its own rules are applied here, to one layer at a time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from core import TensorInfo, TensorSpec, Weights


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one parameter (or what one conversion gives) comes from the checkpoint.

    `sources` are pairs of the conversion's pattern and a checkpoint's name. `packed` is a linear layer's weight.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    conversion: Any
    specs: tuple[TensorSpec, ...]
    packed: bool = False

    def read(self, weights: Weights, model: Any) -> dict[str, Tensor]:
        """The parameters by their names in `model`."""
        if self.conversion is None:
            return {self.target: weights.tensor(self.sources[0][1])}
        conversion = deepcopy(self.conversion)
        for pattern, name in self.sources:
            conversion.add_tensor(self.target, name, pattern, weights.tensor(name))
        made = conversion.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(model: Any, tensors: Mapping[str, TensorInfo], layer_prefix: str) -> list[Recipe]:
    """What makes every parameter of `model`, which is on the meta device, in the order of the model's own.

    A parameter that nothing in `tensors` makes has a recipe all the same: it names the tensor that is missing.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    sources = _sources(model, state, tensors, conversions)
    linears = _plain_linears(model, layer_prefix)
    in_fp32 = _fp32_pattern(model)
    found: list[Recipe] = []
    made: set[str] = set()
    for target in state:
        if target not in sources:
            continue
        conversion, pairs = sources[target]
        owner = target.rpartition(".")[0]
        plain = conversion is None and owner in linears and not in_fp32(target)
        if plain and target.endswith(".bias") and f"{owner}.weight" in sources:
            made.add(target)
            continue
        shapes = {name: state[target].shape if conversion is None else tensors[name].shape for _, name in pairs}
        packed = plain and pairs[0][1].endswith(".weight")
        specs = tuple(TensorSpec(name, tuple(shape), packed, in_fp32(target)) for name, shape in shapes.items())
        if packed and f"{owner}.bias" in sources:
            specs += (TensorSpec(sources[f"{owner}.bias"][1][0][1], tuple(state[f"{owner}.bias"].shape)),)
        found.append(Recipe(target, tuple(pairs), conversion, specs, packed))
        made.update(_made_by(target, conversion))
    return found + [_missing(name, state[name]) for name in state if name not in made and _is_needed(model, name)]


def _sources(
    model: Any, state: Mapping[str, Tensor], names: Iterable[str], conversions: list[Any]
) -> dict[str, tuple[Any, list[tuple[str, str]]]]:
    """By parameter: the conversion that makes it, and the tensors that it is made of (transformers' own matching)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target in state:
            conversion = by_pattern[pattern] if pattern is not None else None
            sources.setdefault(target, (conversion, []))[1].append((pattern or name, name))
    return sources


def _made_by(target: str, conversion: Any) -> set[str]:
    if conversion is None:
        return {target}
    first, *others = conversion.target_patterns
    return {target, *(target.replace(first, other) for other in others)}


def _missing(name: str, empty: Tensor) -> Recipe:
    return Recipe(name, ((name, name),), None, (TensorSpec(name, tuple(empty.shape)),))


def _is_needed(model: Any, name: str) -> bool:
    optional = model._keys_to_ignore_on_load_missing or ()
    return name not in model.all_tied_weights_keys and not any(re.search(pattern, name) for pattern in optional)


def _fp32_pattern(model: Any) -> Any:
    """Whether a parameter is held in float32 whatever the compute dtype: the family's code says so in two ways."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    kept = list(model._get_dtype_plan(torch.float16))
    pattern = build_glob_alternation(kept)[0] if kept else None
    state = model.state_dict()

    def in_fp32(name: str) -> bool:
        return state[name].dtype is torch.float32 or bool(pattern and pattern.search(name))

    return in_fp32


def _plain_linears(model: nn.Module, layer_prefix: str) -> set[str]:
    """The linear layers that the family only calls: those whose weights its code touches can't be packed."""
    found = set()
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            path = f"{name}.{child}".removeprefix(".")
            touched = re.search(rf"\b{re.escape(child)}\.(weight|bias)\b", _source(type(parent)))
            if type(module) is nn.Linear and path.startswith(layer_prefix) and not touched:
                found.add(path)
    return found


@cache
def _source(kind: type) -> str:
    own = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    return "\n".join(inspect.getsource(base) for base in own)
