"""What a planner is asked: the layers' sizes with their KV caches, and what of a node's memory may be filled.

And its answer, which is held to what a plan is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.errors import PlanError
from core.interfaces.planner import Candidate, Plan, Planner, PlanRequest
from core.runtime.model import Model, Precision

_log = logging.getLogger(__name__)

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


def planned(planner: Planner, request: PlanRequest) -> Plan:
    """The planner's plan. Raises PlanError where there is none, or where the planner fails or plans what can't be."""
    try:
        plan = planner.plan(request)
        fault = _fault(plan, request)
    except PlanError:
        raise
    except Exception as error:
        _log.exception("the planner %s failed", planner.name)
        raise PlanError(f"the planner {planner.name!r} failed", f"{type(error).__name__}: {error}") from error
    if fault:
        raise PlanError(f"the planner {planner.name!r} made a plan that can't be", fault, "choose another planner")
    return plan


def _fault(plan: Plan, request: PlanRequest) -> str:
    """What of `plan` contradicts the request; empty where nothing does."""
    if not isinstance(plan, Plan):
        return f"it is {plan!r}, and no Plan"
    layers, unused = len(request.layer_bytes), {candidate.node_id for candidate in request.candidates}
    known = frozenset(unused)
    for node_id in (*(stage.node_id for stage in plan.stages), *(node_id for node_id, _ in plan.left_out)):
        if node_id not in unused:
            return f"{node_id!r} is used twice" if node_id in known else f"{node_id!r} is no candidate"
        unused.remove(node_id)
    end = 0
    for stage in plan.stages:
        given = f"{stage.node_id!r} is given layers [{stage.start}, {stage.end})"
        if not stage.start < stage.end <= layers:
            return f"{given} of {layers}"
        if stage.start != end:
            return f"{given} where [{end}, ...) follow"
        end = stage.end
    if end < layers:
        return f"layers [{end}, {layers}) are on no node"
    most = len(plan.stages) if request.max_stages is None else request.max_stages
    if not request.min_stages <= len(plan.stages) <= most:
        return f"{len(plan.stages)} nodes are used, outside the bounds that were asked for"
    return ""
