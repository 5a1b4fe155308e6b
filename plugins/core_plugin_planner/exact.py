"""The best order of few nodes, exactly: dynamic programming over the nodes that are left and the layers that are."""

from __future__ import annotations

import numpy as np

from core_plugin_planner.objective import Objective, Order
from core_plugin_planner.problem import NEVER, Array

MAX_NODES = 8
"""With more of them it takes longer than the search, which finds what is as good in almost every case."""


def best_order(objective: Objective) -> Order:
    """The best order; of those that are equally good, one with the fewest nodes, and then with the first ones."""
    following = _following(objective)
    choices = [_nodes(chosen) for chosen in range(1, 1 << objective.nodes)]
    costs = {nodes: _final(objective, following, nodes) for nodes in choices if objective.required.issubset(nodes)}
    nodes = min(costs, key=lambda nodes: (costs[nodes], len(nodes), nodes))
    return _ordered(objective, following, nodes)


def _nodes(chosen: int) -> Order:
    return tuple(index for index in range(chosen.bit_length()) if chosen >> index & 1)


def _bits(nodes: Order) -> int:
    return sum(1 << index for index in nodes)


def _final(objective: Objective, following: Array, nodes: Order) -> int:
    return int(following[_bits(nodes), -1, 0]) + objective.shortage(len(nodes))


def _following(objective: Objective) -> Array:
    """[nodes as bits, the machine before them, layer]: the least cost of the layers from there on, on all of the nodes.

    The wire to the first of them is counted, and the one home.
    """
    nodes, layers, wires = objective.nodes, objective.layers, objective.wires
    following = np.full((1 << nodes, nodes + 1, layers + 1), NEVER)
    following[0, :, layers] = wires[:, -1]
    for chosen in range(1, 1 << nodes):
        firsts = np.array(_nodes(chosen))
        if len(firsts) > objective.most:
            continue
        rest = following[chosen & ~(1 << firsts), firsts]
        first = objective.join(objective.stages[firsts], rest[:, None, :]).min(axis=2)
        following[chosen] = np.minimum(objective.join(wires[:, firsts, None], first[None]).min(axis=1), NEVER)
    return following


def _ordered(objective: Objective, following: Array, nodes: Order) -> Order:
    """The first of the best orders of `nodes`."""
    order: list[int] = []
    left, before, start = _bits(nodes), -1, 0
    while left:
        aim = following[left, before, start]
        for node in _nodes(left):
            rest = following[left & ~(1 << node), node]
            costs = objective.join(objective.stages[node, start], rest, objective.wires[before, node])
            if costs.min() == aim:
                order.append(node)
                left, before, start = left & ~(1 << node), node, int(costs.argmin())
                break
    return tuple(order)
