"""The planner `measured`: which nodes, in which order, with which layers, by what was measured of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from core import Plan, PlanError, Planner, PlanRequest, StagePlan
from core_plugin_planner.balanced import BalancedPlanner
from core_plugin_planner.explain import Explanation
from core_plugin_planner.objective import Order, Path, stages_of
from core_plugin_planner.problem import Problem
from core_plugin_planner.solve import solve

SHARED = "shared"
"""The label of a machine that others use too."""


class MeasuredPlanner(Planner):
    """A token of one stream takes the least time; or for throughput the slowest stage does, and then a token.

    With its share of the prompt, as far as machines have timed prompts.

    Of plans within 2 % of that, the one that loads least; then one with few stages, filled alike. In haste, where
    something is held, loading and an answer of 512 tokens take the least time together. Machines with the label
    `shared` are used only if the model does not fit without them, or if layers are pinned to them.

    Nodes whose speed is not known are taken to be as fast as the median of the others; if none is known, all are
    alike, so that as few as possible are used, those with the most memory. The order of joining decides nothing.
    """

    name: ClassVar[str] = "measured"

    def plan(self, request: PlanRequest) -> Plan:
        refuse_impossible_pins(request)
        nodes = tuple(sorted(request.candidates, key=lambda node: node.node_id))
        own = tuple(node for node in nodes if SHARED not in node.labels or request.pins.get(node.node_id))
        for candidates in dict.fromkeys((own, nodes)):
            problem = Problem(replace(request, candidates=candidates))
            if problem.most >= max(problem.fewest, 1) and (path := _solved(problem)):
                told = Explanation(problem, path)
                shared = [node.node_id for node in nodes if node not in candidates]
                return Plan(_stages(problem, path), tuple(told.left_out(shared)), tuple(told.notes()))
        raise _refusal(replace(request, candidates=nodes))


def refuse_impossible_pins(request: PlanRequest) -> None:
    """Raises PlanError if no plan could have all layers where they are pinned, whatever fits."""
    nodes = {node.node_id for node in request.candidates}
    pins = sorted((pin for pin in request.pins.items() if pin[1]), key=lambda pin: pin[1].start)
    for node_id, layers in pins:
        told = f"layers [{layers.start}, {layers.stop}) are pinned to node {node_id!r}"
        if node_id not in nodes:
            raise PlanError("a node is missing", f"{told}, which is not there", "let it join, or pin nothing to it")
        if layers.start < 0 or layers.stop > len(request.layer_bytes):
            raise PlanError("there are no such layers", f"{told}, and there are {len(request.layer_bytes)}")
    for (one, first), (other, second) in pairwise(pins):
        if second.start < first.stop:
            raise PlanError("a layer is pinned twice", f"layer {second.start} to node {one!r} and to node {other!r}")


def _solved(problem: Problem) -> Path | None:
    for among, chosen in problem.promising():
        path = solve(among, _starts(among)) if among.most >= among.fewest else None
        if path:
            return tuple((chosen[node], end) for node, end in path)
    return None


def _starts(problem: Problem) -> list[Order]:
    """A search among many nodes begins from few of them, from those that hold layers, and from what `balanced` has."""
    nodes, holding = problem.nodes, _holding(problem)[: problem.most]
    balanced: list[int] = []
    with suppress(PlanError):
        chosen = [stage.node_id for stage in BalancedPlanner().plan(problem.request).stages]
        balanced = [index for node_id in chosen for index, node in enumerate(nodes) if node.node_id == node_id]
    starts = [problem.pinned or (0,), holding, tuple(balanced)]
    return [start for start in starts if start and problem.required.issubset(start)]


def _holding(problem: Problem) -> Order:
    """Few nodes that have in memory what is there, those that hold most, in the order of their layers."""
    held = {index: sorted(node.held) for index, node in enumerate(problem.nodes) if node.held}
    covered, chosen = set[int](), []
    for index in sorted(held, key=lambda index: (-len(held[index]), index)):
        if not covered.issuperset(held[index]):
            covered.update(held[index])
            chosen.append(index)
    return tuple(sorted(chosen, key=lambda index: (held[index][len(held[index]) // 2], index)))


def _stages(problem: Problem, path: Path) -> tuple[StagePlan, ...]:
    nodes = [
        (problem.nodes[node].node_id, problem.costs[node].takes, start, end) for node, start, end in stages_of(path)
    ]
    return tuple(StagePlan(node_id, start, end, takes[end] - takes[start]) for node_id, takes, start, end in nodes)


def _refusal(request: PlanRequest) -> PlanError:
    """Why there is no plan."""
    try:
        BalancedPlanner().plan(request)
    except PlanError as error:
        return error
    return PlanError(
        "the model does not fit as its layers are pinned",
        "without the pins it would",
        "pin fewer layers",
    )
