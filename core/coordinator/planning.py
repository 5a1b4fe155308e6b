"""What a planner is asked: the layers' sizes with their KV caches, and what of a node's memory may be filled.

And its answer, which is held to what a plan is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import trio

from core.coordinator.members import Member
from core.coordinator.prediction import Prediction, gain, predict
from core.coordinator.route import Route
from core.coordinator.settings import CoordinatorSettings
from core.errors import PlanError
from core.interfaces.planner import Candidate, Plan, Planner, PlanRequest, StagePlan
from core.protocol.fields import Holding
from core.runtime.model import Model, Precision

_log = logging.getLogger(__name__)

RESERVED_CONTEXT = 4096
"""Tokens of KV cache that a plan sets aside in every layer (fewer if the model's context is shorter)."""
USABLE = 0.9
"""The part of a node's free memory that a plan fills at most: batches need room as well."""


@dataclass(frozen=True, slots=True)
class Planning:
    """Asks `planner` for plans of `model`.

    `held_as` has all its layers, as nodes hold them. `free_at_start`: bytes that the device of this machine
    had free before anything was loaded.
    """

    settings: CoordinatorSettings
    planner: Planner
    model: Model
    precision: Precision
    held_as: Holding
    free_at_start: int

    async def plan(self, members: Sequence[Member], *, beside: Collection[Route] = (), in_haste: bool = False) -> Plan:
        """A plan for `members`, which has room while the routes `beside` it go on serving.

        Raises PlanError, in words, if there is none.
        """
        missing = self.settings.min_nodes - len(members)
        if missing > 0:
            raise PlanError(f"{missing} more node{'s' if missing > 1 else ''} must join")
        request = self._request([self._candidate(member, beside) for member in members], in_haste)
        return await trio.to_thread.run_sync(planned, self.planner, request)

    def gain(self, plan: Plan, route: Route, members: Sequence[Member]) -> str:
        """In what `plan` is predicted to be so much better than `route` that it should take its place; or empty."""
        serving = plan_of(route)
        known = {member.node_id: self._candidate(member, ()) for member in (*members, *_members_of(route))}
        used = {stage.node_id for stage in (*plan.stages, *serving.stages)}
        if not all(known[node_id].round_trip for node_id in used):
            # A link that was measured and one that was not can't be compared.
            known = {node_id: replace(candidate, round_trip=0.0) for node_id, candidate in known.items()}
        candidates = tuple(known.values())
        return gain(self._predict(plan, candidates), self._predict(serving, candidates))

    def layer_bytes(self, layers: range) -> int:
        """Of their weights."""
        return sum(self.model.layer_bytes(layer, self.precision) for layer in layers)

    def memory(self, member: Member) -> int:
        """Bytes that it offers for layers and their caches, if it held none."""
        hello = member.hello
        if member.is_local:
            free = float(self._local_memory())
        else:
            free = float(hello.free_memory or self.settings.target_node_memory or 0)
        return node_memory(free, hello.max_memory_bytes)

    @property
    def from_hub(self) -> bool:
        """Whether a node has to bring the model's files to its machine."""
        return self.model.checkpoint.revision is not None

    def held(self, member: Member) -> frozenset[int]:
        """The layers that it has in memory."""
        return member.holds(self.held_as)

    def is_partly_held(self, members: Sequence[Member]) -> bool:
        """Whether these hold some layers, and not all."""
        held = frozenset[int]().union(*(self.held(member) for member in members))
        return 0 < len(held) < self.model.spec.layers

    def _predict(self, plan: Plan, candidates: Sequence[Candidate]) -> Prediction:
        request, longest = self._request(candidates, in_haste=False), self.model.spec.context_length
        return predict(plan, candidates, request, self.model.kv_bytes(1, self.precision), longest)

    def _candidate(self, member: Member, beside: Collection[Route]) -> Candidate:
        hops = [hop for route in beside for hop in route.hops if hop.member is member]
        pinned = frozenset(layer for hop in hops for layer in hop.layers)
        taken = sum(self.layer_bytes(range(layer, layer + 1)) for layer in pinned)
        taken += sum(hop.kv_bytes for hop in hops)
        return Candidate(
            member.node_id,
            max(0, self.memory(member) - taken),
            member.hello.selected_device,
            speed=member.hello.speed,
            round_trip=member.link.round_trip or 0.0,
            held=self.held(member) | pinned,
            pinned=pinned,
        )

    def _request(self, candidates: Sequence[Candidate], in_haste: bool) -> PlanRequest:
        settings = self.settings
        return plan_request(
            self.model, self.precision, candidates, settings.min_nodes, settings.max_nodes, in_haste=in_haste
        )

    def _local_memory(self) -> int:
        """Each local node's share, whatever the coordinator and its siblings hold by the time it measures."""
        free = max(0, self.free_at_start - self.model.embed_and_head_bytes(self.precision))
        return free // max(1, self.settings.local_nodes)


def node_memory(free: float, cap: int | None = None) -> int:
    """Bytes of `free` for layers and caches, and no more than the `cap` of the machine's user."""
    usable = int(free * USABLE)
    return usable if cap is None else min(usable, cap)


def plan_request(
    model: Model,
    precision: Precision,
    candidates: Sequence[Candidate],
    min_nodes: int,
    max_nodes: int | None,
    *,
    in_haste: bool = False,
) -> PlanRequest:
    reserve = model.kv_bytes(min(model.spec.context_length, RESERVED_CONTEXT), precision)
    weights = tuple(model.layer_bytes(layer, precision) for layer in range(model.spec.layers))
    return PlanRequest(
        layer_bytes=tuple(nbytes + reserve for nbytes in weights),
        candidates=tuple(candidates),
        min_stages=min_nodes,
        max_stages=max_nodes,
        weight_bytes=weights,
        in_haste=in_haste,
    )


def plan_of(route: Route) -> Plan:
    """What `route` was made of."""
    return Plan(
        tuple(StagePlan(hop.member.node_id, hop.layers.start, hop.layers.stop, hop.weight_bytes) for hop in route.hops)
    )


def same_stages(plan: Plan, other: Plan) -> bool:
    return [(s.node_id, s.start, s.end) for s in plan.stages] == [(s.node_id, s.start, s.end) for s in other.stages]


def describe(plan: Plan) -> str:
    return ", ".join(f"{stage.node_id} [{stage.start}, {stage.end})" for stage in plan.stages)


def _members_of(route: Route) -> list[Member]:
    return [hop.member for hop in route.hops]


def planned(planner: Planner, request: PlanRequest) -> Plan:
    """The planner's plan. Raises PlanError where there is none, or where the planner fails or plans what can't be."""
    try:
        plan = planner.plan(request)
        fault = _fault(plan, request)
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
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
        if not (isinstance(stage.start, int) and isinstance(stage.end, int)):
            return f"{given}, which are no whole numbers"
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
