"""Which nodes, and which layers on each: both found by dynamic programming over contiguous ranges, so exactly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

from core import Candidate, Plan, PlanError, Planner, PlanRequest, StagePlan

Choice = tuple[int, tuple[int, ...]]
"""Nodes that hold some layers: their memory in all, and their negated indices. The greatest choice is the best."""

_NO_CHOICE: Choice = (-1, ())


class BalancedPlanner(Planner):
    """As few stages as fit, since each hop costs time and none saves any; of these the nodes with the most memory.

    Among equals those that joined earlier. The stages follow the order of joining, and are split where the fullest
    node, in bytes per byte of memory, is least full; then the next fullest, and so on.
    """

    name: ClassVar[str] = "balanced"

    def plan(self, request: PlanRequest) -> Plan:
        _refuse_impossible_counts(request)
        offsets = [0, *accumulate(request.layer_bytes)]
        chosen = _choose(request, offsets)
        nodes = [request.candidates[index] for index in chosen]
        borders = _balanced_borders(offsets, [node.memory for node in nodes])
        stages = tuple(
            StagePlan(node.node_id, start, end, offsets[end] - offsets[start])
            for node, (start, end) in zip(nodes, pairwise(borders), strict=True)
        )
        return Plan(stages, _left_out(request, chosen))


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
            f"ask for {_nodes(layers)}" + (" or fewer" if layers > 1 else ""),
        )
    if needed > there:
        total, offered = sum(request.layer_bytes), sum(node.memory for node in request.candidates)
        raise PlanError(
            "too few nodes",
            f"{_nodes(needed)} needed, {there} there",
            "let more nodes join, or ask for fewer",
            missing_bytes=max(0, total - offered),
        )


def _choose(request: PlanRequest, offsets: Sequence[int]) -> list[int]:
    """The indices of the nodes to use, ascending. Raises PlanError where no choice holds the layers."""
    layers = len(request.layer_bytes)
    most = layers if request.max_stages is None else min(request.max_stages, layers)
    rows: list[list[Choice]] = []
    for count, row in enumerate(_best_choices(offsets, [node.memory for node in request.candidates])):
        if count > most:
            break
        if count >= request.min_stages and row[-1] != _NO_CHOICE:
            return [-index for index in row[-1][1]]
        rows.append(row)
    raise _does_not_fit(request, offsets, rows, most)


def _best_choices(offsets: Sequence[int], memories: Sequence[int]) -> Iterator[list[Choice]]:
    """For each number of nodes from 0 on: the best choice of so many that holds the first n layers, by n."""
    layers = len(offsets) - 1
    fewer: list[list[Choice]] = [[(0, ()), *[_NO_CHOICE] * layers] for _ in range(len(memories) + 1)]
    yield fewer[-1]
    for _ in memories:
        among: list[list[Choice]] = [[_NO_CHOICE] * (layers + 1)]
        for index, memory in enumerate(memories):
            starts = [bisect_left(offsets, offset - memory) for offset in offsets]
            before = [max(fewer[index][start:end], default=_NO_CHOICE) for end, start in enumerate(starts)]
            among.append([max(*pair) for pair in zip(among[index], _joined(before, index, memory), strict=True)])
        fewer = among
        yield fewer[-1]


def _joined(choices: Sequence[Choice], index: int, memory: int) -> list[Choice]:
    return [choice if choice == _NO_CHOICE else (choice[0] + memory, (*choice[1], -index)) for choice in choices]


def _balanced_borders(offsets: Sequence[int], memories: Sequence[int]) -> tuple[int, ...]:
    """The layer at which each stage starts, and the end, so that the fills, fullest first, are least."""
    layers = len(offsets) - 1
    best: list[tuple[tuple[float, ...], tuple[int, ...]] | None] = [None] * layers + [((), (layers,))]
    for memory in reversed(memories):
        following, best = best, []
        for start in range(layers + 1):
            furthest = bisect_right(offsets, offsets[start] + memory) - 1
            splits = []
            for end in range(start + 1, furthest + 1):
                if (rest := following[end]) is not None:
                    fill = (offsets[end] - offsets[start]) / memory
                    splits.append((tuple(sorted((fill, *rest[0]), reverse=True)), (start, *rest[1])))
            best.append(min(splits, default=None))
    assert best[0] is not None, "the nodes were chosen because they hold the layers"
    return best[0][1]


def _does_not_fit(
    request: PlanRequest, offsets: Sequence[int], rows: Sequence[Sequence[Choice]], most: int
) -> PlanError:
    more, missing = _missing(offsets, rows, request.min_stages, most)
    total, offered = offsets[-1], sum(node.memory for node in request.candidates)
    count = len(request.candidates)
    there = f"{_nodes(count)} {'offers' if count == 1 else 'offer'}"
    limits = f"; {request.min_stages} or more must each hold a layer" if request.min_stages > 1 else ""
    if request.max_stages is not None:
        limits += f"; at most {request.max_stages} may be used"
    return PlanError(
        "the model does not fit",
        f"its layers take {_at_least(total)}, and {there} {_at_most(offered)} in all{limits}",
        f"add {_nodes(more)} with {_at_least(missing)} to offer, or choose a smaller model or a stronger quantization",
        missing_bytes=missing,
    )


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


def _left_out(request: PlanRequest, chosen: Sequence[int]) -> tuple[tuple[str, str], ...]:
    unused = (node for index, node in enumerate(request.candidates) if index not in chosen)
    full = len(chosen) == request.max_stages
    return tuple((node.node_id, _reason(node, min(request.layer_bytes), full)) for node in unused)


def _reason(node: Candidate, smallest_layer: int, full: bool) -> str:
    if node.memory < smallest_layer:
        return f"too small: even one layer takes {_at_least(smallest_layer)} and it offers {_at_most(node.memory)}"
    if full:
        return "the highest number of nodes that may be used is reached without it"
    return "spare: the model fits without it"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _at_least(nbytes: int) -> str:
    """Rounded up, so that a need is never told too small."""
    return f"{-(-nbytes // 10**7) / 100:.2f} GB" if nbytes >= 10**8 else f"{-(-nbytes // 10**6)} MB"


def _at_most(nbytes: int) -> str:
    """Rounded down, so that an offer is never told too large."""
    return f"{nbytes // 10**7 / 100:.2f} GB" if nbytes >= 10**8 else f"{nbytes // 10**6} MB"
