"""Orders of many nodes that are good to begin a search from: one best way to each node and layer, by stages."""

from __future__ import annotations

import numpy as np

from core_plugin_planner.objective import Objective, Order
from core_plugin_planner.problem import NEVER, VIOLATION, Array

PATIENCE = 3
"""Stages that are added to no avail before it is given up."""


def label_orders(objective: Objective) -> list[Order]:
    """The best order found for each number of stages, the best first.

    For each node and layer there is one label: the cheapest way found to have that node do the last of the layers
    before it, in so many stages. It is extended by nodes that it has not used. The best order of all is missed if all
    cheapest ways to a part of it use a node that comes later.
    """
    nodes, layers = objective.nodes, objective.layers
    costs = objective.join(np.repeat(objective.wires[-1, :-1, None], layers + 1, axis=1), objective.stages[:, 0, :])
    used = np.repeat(np.eye(nodes, dtype=bool)[:, None, :], layers + 1, axis=1)
    orders = np.repeat(np.arange(nodes)[:, None, None], layers + 1, axis=1)
    found: list[tuple[int, int, Order]] = []
    while True:
        stages = orders.shape[2]
        ends = objective.join(costs[:, -1], objective.wires[:-1, -1])
        missing = len(objective.required) - used[:, -1, sorted(objective.required)].sum(axis=1)
        totals = ends + missing * VIOLATION + objective.shortage(stages)
        last = int(totals.argmin())
        found.append((int(totals[last]), stages, tuple(map(int, orders[last, -1]))))
        if stages >= objective.most or (stages - min(found)[1] >= PATIENCE and min(found)[0] < VIOLATION):
            return [order for _, _, order in sorted(found)]
        costs, used, orders = _extended(objective, costs, used, orders)


def _extended(objective: Objective, costs: Array, used: Array, orders: Array) -> tuple[Array, Array, Array]:
    """With one more stage."""
    longer, layers = [], np.arange(objective.layers + 1)
    for node in range(objective.nodes):
        reached = np.where(used[:, :, node], NEVER, objective.join(costs, objective.wires[:-1, node, None]))
        before = reached.argmin(axis=0)
        stages = objective.join(reached[before, layers][:, None], objective.stages[node])
        start = stages.argmin(axis=0)
        origin = before[start], start
        now = used[origin].copy()
        now[:, node] = True
        order = np.concatenate([orders[origin], np.full((objective.layers + 1, 1), node)], axis=1)
        longer.append((np.minimum(stages[start, layers], NEVER), now, order))
    return np.stack([c for c, _, _ in longer]), np.stack([u for _, u, _ in longer]), np.stack([o for _, _, o in longer])
