"""The best plan of a problem: what is fastest, and then what is nearly as fast and moves fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from core import PlanFor
from core_plugin_planner.exact import MAX_NODES, best_order
from core_plugin_planner.labels import label_orders
from core_plugin_planner.objective import Objective, Order, Path, stages_of
from core_plugin_planner.problem import NANOSECONDS, NEVER, VIOLATION, Array, Problem
from core_plugin_planner.search import good_order, spread_order

NEAR = 0.02
"""Plans that cost so much more than the best one count as equally good: measured times are off by as much."""
MOVING_SHARE = 0.75
"""Of NEAR, what is paid to load nothing; the rest, to use few nodes and fill them alike."""
ZEAL = (1000, 30, 3, 1)
"""How many times as much is offered for it at first: what is paid may come to less, and is seen afterwards."""
HASTE_TOKENS = 512
"""In haste what counts is when an answer of so many tokens is there, loading included."""
HASTE_SLACK = NANOSECONDS
"""In haste a second more or less decides nothing."""
RESTARTS = 2
"""How often the search for many nodes' best order begins again."""
LABELLED = 3
"""How many of the label orders it begins from."""


def solve(problem: Problem, starts: Sequence[Order]) -> Path | None:
    """The best plan; None if none fits. `starts` are orders from which many nodes' best order is looked for."""
    if weighs_loading(problem):
        answer = np.where(problem.serve < NEVER, problem.serve * HASTE_TOKENS, NEVER)
        objective = _objective(
            problem, np.minimum(answer + problem.loading, NEVER), problem.serving_wires * HASTE_TOKENS
        )
        return _tidied(problem, objective, _with_labelled(objective, starts), slack=HASTE_SLACK)
    fastest = for_speed(problem)
    if not fastest.bottleneck:
        return _tidied(problem, fastest, _with_labelled(fastest, starts))
    order = _fastest(problem, fastest, RESTARTS)
    bound = fastest.cost(order)
    if bound >= VIOLATION:
        return None
    slow = (problem.serve > bound * (1 + NEAR)) & (problem.serve < NEVER)
    one_stream = _objective(problem, np.where(slow, problem.serve + VIOLATION, problem.serve), problem.serving_wires)
    return _tidied(problem, one_stream, [order], restarts=0)


def weighs_loading(problem: Problem) -> bool:
    """Whether somebody waits for the plan, and a part of it is loaded already."""
    return problem.request.in_haste and any(node.held for node in problem.nodes)


def for_speed(problem: Problem) -> Objective:
    """What the plan is to make short, whatever is to be loaded: a token's time in one stream, or the slowest stage's.

    Either with the rows of prompts that come with it. In the latter case wires cost nothing: a row travels while
    others are computed.
    """
    if problem.request.plan_for is PlanFor.THROUGHPUT:
        return replace(_objective(problem, problem.serve, np.zeros_like(problem.wires)), bottleneck=True)
    return _objective(problem, problem.serve, problem.serving_wires)


def best_cost(problem: Problem) -> int | None:
    """For speed alone, of the best plan; None if there is none."""
    for among, _ in problem.promising():
        if among.most < among.fewest:
            continue
        objective = for_speed(among)
        cost = objective.cost(_fastest(among, objective, restarts=0))
        if cost < VIOLATION:
            return cost
    return None


def _fastest(problem: Problem, objective: Objective, restarts: int) -> Order:
    """The best order for speed."""
    if objective.bottleneck and objective.nodes > MAX_NODES:
        return good_order(objective, [spread_order(objective, problem.pinned)], restarts)
    return _best(objective, _with_labelled(objective, [problem.pinned or (0,)]), restarts)


def _tidied(
    problem: Problem,
    objective: Objective,
    starts: Sequence[Order],
    *,
    slack: int = 0,
    restarts: int = RESTARTS,
) -> Path | None:
    """What is nearly as good as the best, loads less, and has few stages that are filled alike.

    Nearly: it costs no more than NEAR and `slack` beyond it. Each of the two is weighed against what the best plan has
    of it: so with a zeal of 1 every plan is near; with more it has to be seen.
    """
    order = _best(objective, starts, restarts)
    cost = objective.cost(order)
    if cost >= VIOLATION:
        return None
    path = objective.path(order)
    moves, untidiness = (
        sum(each[stage] for stage in stages_of(path)) for each in (problem.loading, problem.untidiness)
    )
    allowance = NEAR * cost + slack
    extra = problem.untidiness * ((1 - MOVING_SHARE) * allowance / untidiness)
    if moves:
        extra += problem.loading * (MOVING_SHARE * allowance / moves)
    for zeal in ZEAL:
        paid = np.rint(np.minimum(zeal * extra, VIOLATION)).astype(np.int64)
        weighed = replace(objective, stages=np.minimum(objective.stages + paid, NEVER))
        tidy = weighed.path(_best(weighed, [order, *starts], restarts=0))
        if objective.cost_of(tidy) <= cost + allowance:
            return tidy
    return path


def _objective(problem: Problem, stages: Array, wires: Array) -> Objective:
    """The sum of both. Each layer that does not fit, or is not where it is pinned, costs VIOLATION."""
    allowed = np.where(stages < NEVER, np.minimum(stages + problem.excess * VIOLATION, NEVER), NEVER)
    return Objective(allowed, wires, problem.fewest, problem.most, problem.required)


def _best(objective: Objective, starts: Sequence[Order], restarts: int) -> Order:
    return best_order(objective) if objective.nodes <= MAX_NODES else good_order(objective, starts, restarts)


def _with_labelled(objective: Objective, starts: Sequence[Order]) -> list[Order]:
    """And the best label orders, if there are too many nodes for an exact solution."""
    if objective.nodes <= MAX_NODES:
        return list(starts)
    labelled = [order for order in label_orders(objective) if objective.required.issubset(order)]
    return [*starts, *labelled[:LABELLED]]
