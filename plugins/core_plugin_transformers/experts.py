"""Experts whose weights are packed one by one.

transformers lets other code than a family's own compute its experts, and its `use_experts_implementation` says of them
how their weights lie and what comes between. Experts without it stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from core import GroupedLinear

_MERGED = [(MergeModulelist, 0)]
_CONCATENATED = [(MergeModulelist, 0), (Concatenate, 1)]


class PackedExperts(nn.Module):
    """What `like` computes, with `projections` by the names of its parameters in their places."""

    def __init__(self, like: Any, projections: Mapping[str, GroupedLinear]) -> None:
        super().__init__()
        up, down = projection_names(like)
        self.up, self.down = projections[up], projections[down]
        self.like = like

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, width], of which each goes to the experts top_k_index [rows, k]."""
        chosen, order = top_k_index.flatten().sort(stable=True)
        ends = torch.bucketize(torch.arange(self.like.num_experts, device=chosen.device), chosen, right=True)
        inner = self.up(hidden_states[order // top_k_index.shape[1]], ends)
        inner = self.like._apply_gate(inner) if self.like.has_gate else self.like.act_fn(inner)
        outer = self.down(inner.to(hidden_states.dtype), ends)
        if self.like.has_post_expert_norm:
            outer = self.like.post_expert_norm(outer)
        weighted = outer * top_k_weights.flatten()[order, None]
        results = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return results.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def are_experts(module: nn.Module) -> bool:
    return hasattr(module, "has_gate") and hasattr(module, "_apply_gate")


def projection_names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def names_by_expert(
    conversion: Any, sources: Sequence[tuple[str, str]], experts: int, transposed: bool
) -> tuple[tuple[str, ...], ...]:
    """What `Weights.experts` wants for a parameter [experts, ...] that `conversion` makes of `sources`.

    Empty where it is made in another way than by stacking each expert's weight, fused along the output dimension.
    """
    if conversion is None:
        return tuple((name,) for _, name in sources)
    steps = [(type(step), getattr(step, "dim", None)) for step in conversion.operations]
    if steps != _MERGED and (steps != _CONCATENATED or transposed):
        return ()
    names = tuple(tuple(name for own, name in sources if own == each) for each in conversion.source_patterns)
    return names if all(len(each) == experts for each in names) else ()
