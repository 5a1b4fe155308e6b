"""What would be planned for other machines than those that are there, and what that would bring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import trio

from core.coordinator.planning import PLAN_SECONDS, Planning, node_memory, planned
from core.coordinator.prediction import Prediction, predict
from core.errors import PlanError, RequestError
from core.interfaces.engine import WhatIf
from core.interfaces.planner import Candidate, Plan, PlanFor, Planner, PlanRequest

MAX_NEWCOMERS = 16


async def what_if(
    planning: Planning, request: PlanRequest, without: Collection[str], newcomers: Sequence[int]
) -> WhatIf:
    """For the nodes of `request` but for those that are left out, and with others of so many bytes of memory."""
    there = [node.node_id for node in request.candidates]
    if strangers := [name for name in without if name not in there]:
        raise RequestError(f"there is no node {strangers[0]!r}", f"there are: {', '.join(there)}", param="without")
    coming = [Candidate(f"new-{at}", node_memory(nbytes), "unknown") for at, nbytes in enumerate(newcomers, start=1)]
    changed = changed_request(request, without, coming)
    with trio.move_on_after(PLAN_SECONDS):
        return await trio.to_thread.run_sync(
            partial(_answer, planning.planner, request, changed),
            abandon_on_cancel=True,
            limiter=planning.threads,
        )
    return WhatIf(f"The planner gave no plan within {PLAN_SECONDS:g} s.")


def changed_request(request: PlanRequest, without: Collection[str], newcomers: Sequence[Candidate]) -> PlanRequest:
    """For the cluster without some of its nodes, and with others."""
    candidates = (*(node for node in request.candidates if node.node_id not in without), *newcomers)
    pins = {node_id: layers for node_id, layers in request.pins.items() if node_id not in without}
    fewest = max(1, min(request.min_stages, len(candidates)))
    return replace(request, candidates=candidates, pins=pins, min_stages=fewest)


def tried(planner: Planner, request: PlanRequest) -> Plan | None:
    try:
        return planned(planner, request)
    except PlanError:
        return None


def difference(now: Plan | None, request: PlanRequest, then: Plan, changed: PlanRequest) -> str:
    """What `then` brings over `now`, in a sentence."""
    if now is None:
        return "As it is, the model does not fit."
    one_stream = request.plan_for is PlanFor.LATENCY
    predicted = _predicted(now, request), _predicted(then, changed)
    before, after = (each.token_seconds if one_stream else each.stage_seconds for each in predicted)
    what = "A token" if one_stream else "A token on the slowest machine"
    if not (before and after):
        return "What that brings can't be said: the speed of some machine is not known."
    if abs(after - before) < 0.01 * before:
        return f"{what} would take {1000 * after:.3g} ms, as now."
    return f"{what} would take {1000 * after:.3g} ms instead of {1000 * before:.3g} ms now."


def _predicted(plan: Plan, request: PlanRequest) -> Prediction:
    return predict(plan, request, _no_caches, 0)


def _no_caches(layers: range) -> Callable[[int], int]:
    """The context is not asked for."""
    return lambda tokens: 0


def _answer(planner: Planner, request: PlanRequest, changed: PlanRequest) -> WhatIf:
    now = tried(planner, request)
    try:
        then = planned(planner, changed)
    except PlanError as error:
        return WhatIf(str(error))
    seconds = _predicted(now, request).token_seconds if now else 0.0, _predicted(then, changed).token_seconds
    return WhatIf(difference(now, request, then, changed), then.stages, dict(then.left_out), then.notes, seconds)
