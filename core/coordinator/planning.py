"""What a planner is asked: the layers' sizes with their KV caches, and what of a node's memory may be filled.

And its answer, which is held to what a plan is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import add

import trio

from core.coordinator.hop import Hop
from core.coordinator.members import Member
from core.coordinator.prediction import Prediction, gain, predict, with_prompts
from core.coordinator.requirements import Requirements
from core.coordinator.route import Route
from core.coordinator.settings import CoordinatorSettings
from core.coordinator.speeds import Speeds
from core.coordinator.token_times import TokenTimes
from core.coordinator.wires import Wires
from core.errors import PlanError, PluginError
from core.interfaces.planner import COORDINATOR, Candidate, Plan, Planner, PlanRequest, StagePlan
from core.protocol.fields import Holding
from core.runtime.model import Model, Precision

_log = logging.getLogger(__name__)

RESERVED_CONTEXT = 4096
"""Tokens of KV cache that a plan sets aside in every layer (fewer if the model's context is shorter)."""
PROMPT_ROWS = 2.0
"""Tokens of prompts that are read for each one that is written: an assumption, see docs/planning.md."""
EXCLUDED = "`core serve --exclude` names it"
USABLE = 0.9
"""The part of a node's free memory that a plan fills at most: batches need room as well."""
PLAN_THREADS = 3
"""Plans that nobody waits for any more are still being made: that of what was lost since does not wait for them."""
PLAN_SECONDS = 60.0
"""A planner that takes longer is given up."""


@dataclass(frozen=True)
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
    speeds: Speeds
    wires: Wires
    times: TokenTimes
    requirements: Requirements
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PLAN_THREADS))
    """A planner that never returns keeps as many."""

    async def plan(self, members: Sequence[Member], *, beside: Collection[Route] = (), in_haste: bool = False) -> Plan:
        """A plan for `members`, which has room while the routes `beside` it go on serving.

        Raises PlanError, in words, if there is none.
        """
        lacking = [(member.node_id, lack) for member in members if (lack := self._why_not(member))]
        able = [member for member in members if member.node_id not in dict(lacking)]
        try:
            plan = await self._planned(able, beside, in_haste)
        except PlanError as error:
            reasons = [error.message, *(f"node {node_id!r} is left out, for {lack}" for node_id, lack in lacking)]
            told = "; ".join(filter(None, reasons))
            raise PlanError(
                error.title,
                told,
                error.hint,
                missing_bytes=error.missing_bytes,
                missing_nodes=error.missing_nodes,
            ) from error
        return replace(plan, left_out=(*plan.left_out, *lacking))

    def _why_not(self, member: Member) -> str:
        """Why it gets no layers, whatever the plan; empty if it may."""
        return EXCLUDED if member.node_id in self.settings.excluded else self.requirements.lacking(member)

    async def _planned(self, members: Sequence[Member], beside: Collection[Route], in_haste: bool) -> Plan:
        missing = self.settings.min_nodes - len(members)
        if missing > 0:
            raise PlanError(f"{missing} more node{'s' if missing > 1 else ''} must join", missing_nodes=missing)
        self._refuse_absent(members)
        request = replace(self._request(members, beside), in_haste=in_haste)
        with trio.move_on_after(PLAN_SECONDS):
            return await trio.to_thread.run_sync(
                planned, self.planner, request, abandon_on_cancel=True, limiter=self.threads
            )
        raise PlanError(f"the planner {self.planner.name!r} gave no plan within {PLAN_SECONDS:g} s")

    def _refuse_absent(self, members: Sequence[Member]) -> None:
        """Raises PlanError if layers are pinned to a node that is not there."""
        absent = self.settings.pins.keys() - {member.node_id for member in members}
        if absent:
            named = ", ".join(map(repr, sorted(absent)))
            raise PlanError(f"layers are pinned to {named}", "it is waited for", "see `core serve --pin`")

    @cached_property
    def asked(self) -> PlanRequest:
        """What planners are asked for, whoever is there. Each status tells it."""
        return self._request((), ())

    def asked_for(self, members: Sequence[Member]) -> PlanRequest:
        """What planners are asked for if those of `members` serve that may get layers."""
        return self._request([member for member in members if not self._why_not(member)], ())

    def gain(self, plan: Plan, route: Route, members: Sequence[Member]) -> str:
        """In what `plan` is predicted to be so much better than `route` that it should take its place; or empty."""
        serving = plan_of(route)
        used = {stage.node_id for stage in (*plan.stages, *serving.stages)}
        known = {member.node_id: member for member in (*members, *_members_of(route))}
        request = self._request(list(known.values()), ())
        # What was measured and what was not can't be compared.
        if not all(request.wire(node_id, COORDINATOR) for node_id in used):
            request = replace(request, wires={})
        new, old = (self._predict(each, request) for each in (plan, serving))
        if all(node.row_seconds and node.chunk_seconds for node in request.candidates if node.node_id in used):
            new, old = with_prompts(new, plan, request), with_prompts(old, serving, request)
        return gain(new, old, request.plan_for)

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
        usable = node_memory(free, hello.max_memory_bytes)
        return min(usable, self.settings.node_memory.get(member.node_id, usable))

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

    def token_seconds(self, hops: Sequence[Hop]) -> float:
        """What a token is predicted to take on the route of `hops`; 0 if a speed is not known."""
        plan = _plan_of(hops)
        return self._predict(plan, self._request([hop.member for hop in hops], ())).token_seconds

    def _predict(self, plan: Plan, request: PlanRequest) -> Prediction:
        longest = self.model.spec.context_length
        return predict(plan, request, partial(self.model.session_cost, precision=self.precision), longest)

    def _candidate(self, member: Member, beside: Collection[Route]) -> Candidate:
        hops = [hop for route in beside for hop in route.hops if hop.member is member]
        pinned = frozenset(layer for hop in hops for layer in hop.layers)
        taken = sum(self.layer_bytes(range(layer, layer + 1)) for layer in pinned)
        taken += sum(hop.kv_bytes for hop in hops)
        return Candidate(
            member.node_id,
            max(0, self.memory(member) - taken),
            member.hello.selected_device,
            row_seconds=self.speeds.row_seconds(member),
            chunk_seconds=self.speeds.chunk_seconds(member),
            held=self.held(member) | pinned,
            pinned=pinned,
            on_disk=member.has_on_disk(self.held_as),
            load_speed=float(member.reported.load_speed),
            labels=frozenset(member.hello.labels),
            estimated=self.speeds.estimated(member),
        )

    def _request(self, members: Sequence[Member], beside: Collection[Route]) -> PlanRequest:
        settings = self.settings
        candidates = [self._candidate(member, beside) for member in members]
        context = planned_context(settings.planned_context, settings.max_context)
        bounds = settings.min_nodes, settings.max_nodes
        asked = plan_request(self.model, self.precision, candidates, *bounds, context)
        pins = {node_id: layers for node_id, layers in settings.pins.items() if node_id in {m.node_id for m in members}}
        return replace(
            asked,
            wires=self.wires.known(members),
            plan_for=settings.plan_for,
            pins=pins,
            prompt_rows=PROMPT_ROWS,
            head_seconds=self.times.head,
        )

    def _local_memory(self) -> int:
        """Each local node's share, whatever the coordinator and its siblings hold by the time it measures."""
        free = max(0, self.free_at_start - self.model.embed_and_head_bytes(self.precision))
        return free // max(1, self.settings.local_nodes)


def node_memory(free: float, cap: int | None = None) -> int:
    """Bytes of `free` for layers and caches, and no more than the `cap` of the machine's user."""
    usable = int(free * USABLE)
    return usable if cap is None else min(usable, cap)


def planned_context(asked: int | None, most: int | None) -> int:
    """For how many tokens of context a plan sets memory aside: as many as was asked for, if the model takes them.

    `most`: generations get no longer than that.
    """
    return asked or min(RESERVED_CONTEXT, most or RESERVED_CONTEXT)


def plan_request(
    model: Model,
    precision: Precision,
    candidates: Sequence[Candidate],
    min_nodes: int,
    max_nodes: int | None,
    context: int = RESERVED_CONTEXT,
) -> PlanRequest:
    """Room for `context` tokens is set aside in each layer, or for as many as the model takes."""
    layers, tokens = range(model.spec.layers), min(model.spec.context_length, context)
    weights = tuple(model.layer_bytes(layer, precision) for layer in layers)
    reserve = [model.session_cost(range(layer, layer + 1), precision)(tokens) for layer in layers]
    return PlanRequest(
        layer_bytes=tuple(map(add, weights, reserve)),
        candidates=tuple(candidates),
        min_stages=min_nodes,
        max_stages=max_nodes,
        weight_bytes=weights,
        row_bytes=model.spec.hidden_size * precision.wire.itemsize,
    )


def plan_of(route: Route) -> Plan:
    """What `route` was made of."""
    return _plan_of(route.hops)


def _plan_of(hops: Sequence[Hop]) -> Plan:
    return Plan(
        tuple(StagePlan(hop.member.node_id, hop.layers.start, hop.layers.stop, hop.weight_bytes) for hop in hops)
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
    except PluginError as error:
        raise PlanError(error.title, error.message, "choose another planner") from error
    except (Exception, SystemExit) as error:
        _log.debug("the planner %s failed", planner.name, exc_info=error)
        raise PlanError(f"the planner {planner.name!r} failed", f"{type(error).__name__}: {error}") from error
    if fault:
        raise PlanError(f"the planner {planner.name!r} made a plan that can't be", fault, "choose another planner")
    return plan


def _fault(plan: Plan, request: PlanRequest) -> str:
    """What of `plan` contradicts the request; empty where nothing does."""
    if not isinstance(plan, Plan):
        return f"it is {plan!r}, and no Plan"
    faults = (check(plan, request) for check in (_of_words, _of_nodes, _of_layers, _of_pins, _of_memory))
    return next(filter(None, faults), "")


def _of_words(plan: Plan, request: PlanRequest) -> str:
    said = (*plan.notes, *itertools.chain(*plan.left_out))
    return next((f"{word!r} is no text" for word in said if not isinstance(word, str)), "")


def _of_nodes(plan: Plan, request: PlanRequest) -> str:
    known = {candidate.node_id for candidate in request.candidates}
    used, left_out = {stage.node_id for stage in plan.stages}, [node_id for node_id, _ in plan.left_out]
    for node_id in (*used, *left_out):
        if node_id not in known:
            return f"{node_id!r} is no candidate"
    for node_id in left_out:
        if node_id in used or left_out.count(node_id) > 1:
            return f"{node_id!r} is left out, and told of twice"
    return ""


def _of_layers(plan: Plan, request: PlanRequest) -> str:
    layers, end = len(request.layer_bytes), 0
    for stage in plan.stages:
        given = f"{stage.node_id!r} is given layers [{stage.start}, {stage.end})"
        if not (isinstance(stage.start, int) and isinstance(stage.end, int)):
            return f"{given}, which are no whole numbers"
        if not stage.start < stage.end <= layers:
            return f"{given} of {layers}"
        if stage.start != end:
            return f"{given} where [{end}, ...) follow"
        end = stage.end
    return f"layers [{end}, {layers}) are on no node" if end < layers else ""


def _of_pins(plan: Plan, request: PlanRequest) -> str:
    used = {stage.node_id for stage in plan.stages}
    most = len(used) if request.max_stages is None else request.max_stages
    for node_id, pinned in request.pins.items():
        if not set(_layers_on(plan, node_id)).issuperset(pinned):
            return f"layers [{pinned.start}, {pinned.stop}) are pinned to {node_id!r}, and it is not given all of them"
    if not request.min_stages <= len(used) <= most:
        return f"{len(used)} nodes are used, outside the bounds that were asked for"
    return ""


def _of_memory(plan: Plan, request: PlanRequest) -> str:
    weights = request.weight_bytes or (0,) * len(request.layer_bytes)
    for node in request.candidates:
        layers = _layers_on(plan, node.node_id)
        taken = sum(request.layer_bytes[i] - weights[i] * (i in node.pinned) for i in layers)
        if layers and taken > node.memory:
            return f"{node.node_id!r} is given layers of {taken} bytes, and offers {node.memory}"
    return ""


def _layers_on(plan: Plan, node_id: str) -> list[int]:
    return [layer for stage in plan.stages if stage.node_id == node_id for layer in range(stage.start, stage.end)]
