"""What a layer costs whoever computes it: how much a row reads of it, and which other layers take as long."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.interfaces.architecture import TensorSpec
from core.runtime.model import Model, Precision, held_bytes

KIND_BYTES = 16
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""What configs call the number of experts that a token is given to."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """`read_bytes` are the weights that one row multiplies with: of a mixture's experts, as many as it chooses.

    Layers of one `kind` take the same time on a machine, whichever model of their family they are of.
    """

    kind: bytes
    read_bytes: int


def layer_costs(model: Model, layers: Iterable[int], precision: Precision, quant: str) -> tuple[LayerCost, ...]:
    """`quant` is the name of what packs the layers."""
    chosen = _chosen(model.spec.config)
    return tuple(_cost(model, layer, precision, quant, chosen) for layer in layers)


def _cost(model: Model, layer: int, precision: Precision, quant: str, chosen: int) -> LayerCost:
    specs = list(model.architecture.layer_tensors(model.spec, layer))
    tensors = model.checkpoint.tensors
    shapes = [(spec.shape, spec.packed, spec.fp32, spec.transposed, tensors[spec.name].form) for spec in specs]
    text = repr((model.architecture.name, quant, str(precision.compute), chosen, shapes))
    kind = hashlib.sha256(text.encode()).digest()[:KIND_BYTES]
    experts = [spec for spec in specs if len(spec.shape) == 3 or _EXPERT.search(spec.name)]
    idle = 1 - chosen / max(chosen, _count(experts)) if chosen else 0.0
    unread = int(idle * held_bytes(experts, precision, tensors))
    return LayerCost(kind, held_bytes(specs, precision, tensors) - unread)


def _count(experts: Sequence[TensorSpec]) -> int:
    """How many experts these are the weights of."""
    stacked = max((spec.shape[0] for spec in experts if len(spec.shape) == 3), default=0)
    return max(stacked, len({found[1] for spec in experts if (found := _EXPERT.search(spec.name))}))


def _chosen(config: Mapping[str, Any]) -> int:
    """0 if the config names no such number: a row reads all experts then, for all that is known."""
    for settings in (config, config.get("text_config")):
        if isinstance(settings, Mapping):
            for name in _CHOSEN:
                if isinstance(count := settings.get(name), int) and count > 0:
                    return count
    return 0
