"""Which nodes, and which layers on each; and the reasons.

Plans that are not made in haste are found by dynamic programming over contiguous ranges, so exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

from core import Plan, PlanError, Planner, PlanRequest, StagePlan
from core_plugin_planner.costs import NodeCosts, best_borders, pinned_weights
from core_plugin_planner.hasty import Path, hasty_stages
from core_plugin_planner.words import at_least, at_most, counted, too_small

Choice = tuple[int, tuple[int, ...]]
"""Nodes that hold some layers: their memory in all, and their negated indices. The greatest choice is the best."""

_NO_CHOICE: Choice = (-1, ())


class BalancedPlanner(Planner):
    """As few stages as fit, since each hop costs time and none saves any; of these the nodes with the most memory.

    Among equals those that joined earlier. The stages follow the order of joining, and are split where the fullest
    node, in bytes per byte of memory, is least full; then the next fullest, and so on.

    In haste, where something is held, as few bytes to load as can be; of these plans as few stages, then those that are
    split as above, then without those that joined last. The stages are in whichever order serves that.
    """

    name: ClassVar[str] = "balanced"

    def plan(self, request: PlanRequest) -> Plan:
        _refuse_impossible_counts(request)
        costs = [NodeCosts.of(node, request) for node in request.candidates]
        path = _path(request, costs)
        starts = (0, *(end for _, end in path))
        stages = tuple(
            StagePlan(
                request.candidates[index].node_id, start, end, costs[index].takes[end] - costs[index].takes[start]
            )
            for start, (index, end) in zip(starts, path, strict=False)
        )
        return Plan(stages, _left_out(request, costs, [index for index, _ in path]))


def _refuse_impossible_counts(request: PlanRequest) -> None:
    needed, there, layers = request.min_stages, len(request.candidates), len(request.layer_bytes)
    if request.max_stages is not None and request.max_stages < needed:
        raise PlanError(
            "the limits on the number of nodes exclude each other",
            f"at least {needed} and at most {request.max_stages} are asked for",
            "change one of the two",
        )
    if needed > layers:
        raise PlanError(
            "the model has too few layers",
            f"{needed} nodes are asked for, each holds at least one layer, and there are {layers}",
            f"ask for {counted(layers)}" + (" or fewer" if layers > 1 else ""),
        )
    if needed > there:
        total, offered = sum(request.layer_bytes), sum(node.memory for node in request.candidates)
        raise PlanError(
            "too few nodes",
            f"{counted(needed)} needed, {there} there",
            "let more nodes join, or ask for fewer",
            missing_bytes=max(0, total - offered - _kept(request)),
        )


def _path(request: PlanRequest, costs: Sequence[NodeCosts]) -> Path:
    most = len(request.layer_bytes) if request.max_stages is None else min(request.max_stages, len(request.layer_bytes))
    if request.in_haste and any(node.held for node in costs) and (hasty := hasty_stages(request, costs, most)):
        return hasty
    chosen = _choose(request, costs, most)
    return tuple(zip(chosen, best_borders([costs[index] for index in chosen])[1:], strict=True))


def _choose(request: PlanRequest, costs: Sequence[NodeCosts], most: int) -> list[int]:
    """The indices of the nodes to use, ascending. Raises PlanError where no choice holds the layers."""
    rows: list[list[Choice]] = []
    for count, row in enumerate(_best_choices(costs, len(request.layer_bytes))):
        if count > most:
            break
        if count >= request.min_stages and row[-1] != _NO_CHOICE:
            return [-index for index in row[-1][1]]
        rows.append(row)
    raise _does_not_fit(request, rows, most)


def _best_choices(costs: Sequence[NodeCosts], layers: int) -> Iterator[list[Choice]]:
    """For each number of nodes from 0 on: the best choice of so many that holds the first n layers, by n."""
    fewer: list[list[Choice]] = [[(0, ()), *[_NO_CHOICE] * layers] for _ in range(len(costs) + 1)]
    yield fewer[-1]
    for _ in costs:
        among: list[list[Choice]] = [[_NO_CHOICE] * (layers + 1)]
        for index, node in enumerate(costs):
            starts = [node.first(end) for end in range(layers + 1)]
            before = [max(fewer[index][start:end], default=_NO_CHOICE) for end, start in enumerate(starts)]
            among.append([max(*pair) for pair in zip(among[index], _joined(before, index, node.memory), strict=True)])
        fewer = among
        yield fewer[-1]


def _joined(choices: Sequence[Choice], index: int, memory: int) -> list[Choice]:
    return [choice if choice == _NO_CHOICE else (choice[0] + memory, (*choice[1], -index)) for choice in choices]


def _does_not_fit(request: PlanRequest, rows: Sequence[Sequence[Choice]], most: int) -> PlanError:
    offsets = [0, *accumulate(request.layer_bytes)]
    more, missing = _missing(offsets, rows, request.min_stages, most)
    total, offered, kept = offsets[-1], sum(node.memory for node in request.candidates), _kept(request)
    count = len(request.candidates)
    there = f"{counted(count)} {'offers' if count == 1 else 'offer'}"
    beside = f", beside {at_most(kept)} of their weights that are held already" if kept else ""
    limits = f"; {request.min_stages} or more must each hold a layer" if request.min_stages > 1 else ""
    if request.max_stages is not None:
        limits += f"; at most {request.max_stages} may be used"
    return PlanError(
        "the model does not fit",
        f"its layers take {at_least(total)}, and {there} {at_most(offered)} in all{beside}{limits}",
        f"add {counted(more)} with {at_least(missing)} to offer, or choose a smaller model or a stronger quantization",
        missing_bytes=missing,
    )


def _kept(request: PlanRequest) -> int:
    """The weights of the layers that are pinned anywhere: no plan needs memory for these."""
    return sum(pinned_weights(request, frozenset[int]().union(*(node.pinned for node in request.candidates))))


def _missing(offsets: Sequence[int], rows: Sequence[Sequence[Choice]], fewest: int, most: int) -> tuple[int, int]:
    """The least number of further nodes that would do, and the least bytes that they would have to offer together.

    They join last, so they get the layers behind those that the best of the present nodes can hold; `rows[n]` says
    which these are for n of the present nodes.
    """
    layers = len(offsets) - 1
    for more in range(1, fewest + 1):
        usable = rows[max(fewest - more, 0) : most - more + 1]
        held = [n for row in usable for n in range(layers - more + 1) if row[n] != _NO_CHOICE]
        if held:
            return more, offsets[-1] - offsets[max(held)]
    raise AssertionError("as many further nodes as stages hold any model")


def _left_out(request: PlanRequest, costs: Sequence[NodeCosts], chosen: Sequence[int]) -> tuple[tuple[str, str], ...]:
    full = len(chosen) == request.max_stages
    unused = [(node.node_id, costs[index]) for index, node in enumerate(request.candidates) if index not in chosen]
    return tuple((node_id, _reason(node, full)) for node_id, node in unused)


def _reason(node: NodeCosts, full: bool) -> str:
    if reason := too_small(node):
        return reason
    if full:
        return "the highest number of nodes that may be used is reached without it"
    return "spare: the model fits without it"
