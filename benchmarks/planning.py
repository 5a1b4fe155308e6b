"""How near the planner `measured` comes to the best plan, on random clusters, and how long it takes for large ones.

The best plan of a small cluster is found by trying all. Of larger ones nobody knows it: there the planner's search is
held against its own exact solution, as far as that can be computed. Times are seconds of this process's CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import suppress

from _measure import machine, spread, verdict
from core_plugin_planner import solve
from core_plugin_planner.measured import MeasuredPlanner

from core.errors import PlanError
from core.interfaces.planner import Plan, PlanFor, PlanRequest
from core.testing.brute_force import least_seconds, random_request, seconds

NEAR_GOAL, SECONDS_GOAL = 1.02, 1.0
ROUNDING = 1e-6
LARGE = ((16, 100), (64, 100), (256, 100))
EXACT = ((9, 48), (10, 24))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10, help="clusters of each larger size")
    asked = parser.parse_args()
    print(machine())
    rng = random.Random(10)
    for plan_for in PlanFor:
        ratios = against_all(rng, plan_for, asked.clusters // len(PlanFor))
        print(f"{plan_for.value:<10} against trying all, up to 6 nodes and 12 layers: {spread(ratios, 'x', 4)}")
        print(verdict(f"{NEAR_GOAL:g} x", max(ratios) <= NEAR_GOAL + ROUNDING))
    for plan_for in PlanFor:
        for nodes, layers in EXACT:
            ratios = against_exact(rng, plan_for, nodes, layers, asked.rounds)
            print(
                f"{plan_for.value:<10} {nodes} nodes, {layers} layers, search against exact: {spread(ratios, 'x', 3)}"
            )
    for nodes, layers in LARGE:
        for plan_for in PlanFor:
            took = [cpu_seconds(random_request(rng, nodes, layers, plan_for)) for _ in range(asked.rounds)]
            print(f"{plan_for.value:<10} {nodes} nodes, {layers} layers: {spread(took, 's')}")
            if (nodes, layers) == LARGE[0]:
                print(verdict(f"{SECONDS_GOAL:g} s", max(took) <= SECONDS_GOAL))


def against_all(rng: random.Random, plan_for: PlanFor, count: int) -> list[float]:
    """Ratios, of so many clusters that hold the model."""
    ratios: list[float] = []
    while len(ratios) < count:
        request = random_request(rng, plan_for=plan_for)
        best = least_seconds(request)
        plan = planned(MeasuredPlanner().plan, request)
        assert (best is None) == (plan is None), request
        if best is not None and plan is not None:
            ratios.append(seconds(plan, request) / best)
    return ratios


def against_exact(rng: random.Random, plan_for: PlanFor, nodes: int, layers: int, count: int) -> list[float]:
    ratios: list[float] = []
    usual = solve.MAX_NODES
    while len(ratios) < count:
        request = random_request(rng, nodes, layers, plan_for)
        plans = []
        for solve.MAX_NODES in (0, nodes):
            plans.append(planned(MeasuredPlanner().plan, request))
        if plans[0] is not None and plans[1] is not None:
            ratios.append(seconds(plans[0], request) / seconds(plans[1], request))
    solve.MAX_NODES = usual
    return ratios


def planned(plan: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan | None:
    with suppress(PlanError):
        return plan(request)
    return None


def cpu_seconds(request: PlanRequest) -> float:
    started = time.process_time()
    planned(MeasuredPlanner().plan, request)
    return time.process_time() - started


if __name__ == "__main__":
    main()
