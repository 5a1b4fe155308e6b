"""A good order of many nodes: local search, each of whose steps weighs all borders of all orders nearby."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import numpy as np

from core_plugin_planner.objective import Objective, Order
from core_plugin_planner.problem import NEVER, Array

Found = tuple[int, int, Order]
"""What an order costs, how many nodes it has, and the order: the least is the best."""
SPREADS = 48
"""Orders of all nodes among which the best is taken if the slowest stage counts."""
FEW = 6
"""Nodes of which all rearrangements are tried."""
MAX_MOVES = 200
"""Steps of one ascent, which in practice takes a few dozen at most."""


def good_order(objective: Objective, starts: Sequence[Order], restarts: int) -> Order:
    """The best order that is found from `starts`, each of which has the required nodes. Deterministic.

    It is disturbed and improved again so often.
    """
    best = min(_improved(objective, start) for start in starts)
    draw = Random(0)
    for _ in range(restarts):
        best = min(best, _improved(objective, _disturbed(objective, best[-1], draw)))
    return best[-1]


def spread_order(objective: Objective, pinned: Order) -> Order:
    """For a bottleneck: the best of some orders of all nodes, the `pinned` ones as they are given, without those that
    it leaves idle.
    """
    idle = replace(objective, stages=np.where(np.eye(objective.layers + 1, dtype=bool), 0, objective.stages))
    nodes, draw, found = [*range(objective.nodes)], Random(0), []
    for _ in range(SPREADS):
        places = iter(pinned)
        order = [next(places) if node in pinned else node for node in nodes]
        ends = [0, *(end for _, end in idle.path(order))]
        shares = {node: end - start for node, (start, end) in zip(order, pairwise(ends), strict=True)}
        most = sorted(order, key=lambda node: (node not in pinned, -shares[node]))[: objective.most]
        found.append(
            _found(objective, tuple(node for node in order if node in most and (shares[node] or node in pinned)))
        )
        draw.shuffle(nodes)
    return min(found)[-1]


def _found(objective: Objective, order: Order) -> Found:
    return objective.cost(order), len(order), order


def _disturbed(objective: Objective, order: Order, draw: Random) -> Order:
    """With other nodes in place of some of its own, and all of them in another order."""
    kept = [node for node in order if node not in objective.required and draw.random() < 0.6]
    unused = [node for node in range(objective.nodes) if node not in order]
    others = draw.sample(unused, min(len(unused), 1 + len(order) // 3))
    mixed = [*sorted(objective.required), *kept, *others][: objective.most]
    draw.shuffle(mixed)
    return tuple(mixed)


def _improved(objective: Objective, order: Order) -> Found:
    """No order nearby is better than what is found from this one."""
    best = _found(objective, order)
    for _ in range(MAX_MOVES):
        better = next((found for found in _rearranged(objective, best[-1]) if found < best), best)
        if better >= best:
            better = min(_exchanged(objective, best[-1]), default=best)
        if better >= best:
            break
        best = better
    return best


def _exchanged(objective: Objective, order: Order) -> Iterator[Found]:
    """For each run of the order, which may be empty, the best one with a node in its place; and the one without it."""
    heads, tails, ends = objective.heads(order), objective.tails(order), (*order, -1)
    for begin in range(len(order) + 1):
        before = order[begin - 1] if begin else -1
        reached = objective.join(heads[begin][None, :, None], objective.stages).min(axis=1)
        for end in range(begin, len(order) + 1):
            kept, owed = (*order[:begin], *order[end:]), objective.required.intersection(order[begin:end])
            if len(owed) > 1:
                break
            links = objective.join(objective.wires[before, :-1], objective.wires[:-1, ends[end]])
            costs = objective.join(objective.join(reached, tails[end][None, :]).min(axis=1), links)
            costs[[*kept] if not owed else [node for node in range(objective.nodes) if node not in owed]] = NEVER
            node = int(costs.argmin())
            total = int(costs[node]) + objective.shortage(len(kept) + 1)
            yield total, len(kept) + 1, (*order[:begin], node, *order[end:])
            if kept and begin < end and not owed:
                total = objective.closed(heads[begin], before, ends[end], tails[end])
                yield total + objective.shortage(len(kept)), len(kept), kept


def _rearranged(objective: Objective, order: Order) -> Iterator[Found]:
    """The same nodes, of which one lies elsewhere; or a run is turned around, or two have changed places.

    Unless there are few, only if the wires cost less then: what layers cost seldom depends on which nodes are between.
    """
    wires: list[list[int]] = objective.wires.tolist()
    on_wires, few, seen = _on_wires(wires, order), len(order) <= FEW, {order}
    heads, tails = objective.heads(order), objective.tails(order)
    for one, other in permutations(range(len(order)), 2):
        without = order[:one] + order[one + 1 :]
        nearby = [(*without[:other], order[one], *without[other:])]
        if one < other:
            nearby.append((*order[:one], *reversed(order[one : other + 1]), *order[other + 1 :]))
            nearby.append((*order[:one], order[other], *order[one + 1 : other], order[one], *order[other + 1 :]))
        for each in nearby:
            if each not in seen and (few or _on_wires(wires, each) < on_wires):
                yield _rearranged_cost(objective, order, heads, tails, each), len(each), each
            seen.add(each)


def _rearranged_cost(
    objective: Objective, order: Order, heads: Sequence[Array], tails: Sequence[Array], other: Order
) -> int:
    """Of another order of the nodes of `order`: `heads` and `tails` know what both begin and end with."""
    moved = [place for place, nodes in enumerate(zip(order, other, strict=True)) if len({*nodes}) > 1]
    begin, end = moved[0], moved[-1] + 1
    ends, head = (-1, *other, -1), heads[begin]
    for place in range(begin, end):
        head = objective.extended(head, ends[place], other[place])
    return objective.closed(head, ends[end], ends[end + 1], tails[end]) + objective.shortage(len(order))


def with_each(objective: Objective, order: Order) -> Array:
    """For each node: what the best order costs that has it in place of a run of this one's, which may be empty."""
    heads, tails, ends = objective.heads(order), objective.tails(order), (-1, *order, -1)
    best = np.full(objective.nodes, NEVER)
    for begin, head in enumerate(heads):
        reached = objective.join(head[None, :, None], objective.stages).min(axis=1)
        reached = objective.join(reached, objective.wires[ends[begin], :-1, None])
        for end in range(begin, len(order) + 1):
            onward = objective.wires[:-1, ends[end + 1], None]
            best = np.minimum(best, objective.join(reached, tails[end][None, :], onward).min(axis=1))
    return best


def _on_wires(wires: Sequence[Sequence[int]], order: Order) -> int:
    return sum(wires[one][other] for one, other in pairwise((-1, *order, -1)))
