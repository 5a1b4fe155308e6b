"""What a planner is asked: the layers' sizes with their KV caches, and what of a node's memory may be filled."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.planner import Candidate, PlanRequest
from core.runtime.model import Model, Precision

RESERVED_CONTEXT = 4096
"""Tokens of KV cache that a plan sets aside in every layer (fewer where the model's context is shorter)."""
USABLE = 0.9
"""The part of a node's free memory that a plan fills, where its user set no cap: batches need room as well."""


def node_memory(free: float, *, capped: bool) -> int:
    """Bytes of `free` for layers and caches; all of it where it is the user's own cap."""
    return int(free if capped else free * USABLE)


def plan_request(
    model: Model,
    precision: Precision,
    candidates: Sequence[Candidate],
    min_nodes: int,
    max_nodes: int | None,
) -> PlanRequest:
    reserve = model.kv_bytes(min(model.spec.context_length, RESERVED_CONTEXT), precision)
    return PlanRequest(
        layer_bytes=tuple(model.layer_bytes(layer, precision) + reserve for layer in range(model.spec.layers)),
        candidates=tuple(candidates),
        min_stages=min_nodes,
        max_stages=max_nodes,
    )
