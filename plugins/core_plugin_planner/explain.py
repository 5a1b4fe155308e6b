"""A plan in words, for those whose machines these are: what limits it, what each machine brings, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from core import COORDINATOR, Candidate, PlanFor, PlanRequest, Wire
from core_plugin_planner.objective import Path, stages_of
from core_plugin_planner.problem import NANOSECONDS, NEVER, VIOLATION, Array, Problem
from core_plugin_planner.search import with_each
from core_plugin_planner.solve import NEAR, best_cost, for_speed, weighs_loading
from core_plugin_planner.words import (
    WORDS,
    at_least,
    instead,
    milliseconds,
    named,
    per_second,
    seconds,
    too_small,
    words,
)

GB = 10**9
CABLE_SECONDS, CABLE_SPEED = 0.0003, 125e6
"""A gigabit cable at home, one way."""
WORTH = 0.05
"""What is told of connections has to be this part of a token's time."""
MIN_SAVED = NANOSECONDS // 2000
"""A cable has to save as much of a token's time to be told of."""
WORTH_A_GIGABYTE = 0.01
"""And what one more gigabyte saves, this part."""
MAX_TRIED = 4
"""Machines of a plan each of which is tried to be done without."""
MAX_AMONG = 16
"""Machines among which others are looked for in its place: among more it takes too long."""


@dataclass(frozen=True)
class Explanation:
    """Of the path that was found for `problem`, of which there may be further candidates."""

    problem: Problem
    path: Path

    @property
    def request(self) -> PlanRequest:
        return self.problem.request

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(node for node, _ in self.path)

    @property
    def is_known(self) -> bool:
        return any(node.row_seconds for node in self.problem.nodes)

    @property
    def for_throughput(self) -> bool:
        return self.request.plan_for is PlanFor.THROUGHPUT

    @property
    def head(self) -> int:
        """Nanoseconds of a token in the coordinator itself; 0 if that is not known."""
        return round(self.request.head_seconds * NANOSECONDS)

    @property
    def token(self) -> str:
        """What machines are compared by."""
        return "a token with its prompt" if self.problem.prompt_shares else "a token"

    def left_out(self, shared: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Every candidate without layers, and why. The `shared` ones were not weighed."""
        used, objective = set(self.order), for_speed(self.problem)
        now, then = objective.cost_of(self.path), with_each(objective, self.order)
        for index, node in enumerate(self.problem.nodes):
            if index not in used:
                yield node.node_id, self._why_not(index, now, int(then[index]))
        for node_id in shared:
            yield node_id, "spare: others use it too, and the model fits without it"

    def notes(self) -> Iterator[str]:
        if not self.is_known:
            yield (
                "How fast these machines are is not known yet: as few as hold the model are used, those with the most"
                " memory."
            )
        else:
            yield from self._speed()
        if len(self.path) > 1:
            yield from self._why_so_many()
        if self.is_known:
            yield from self._more_memory()
        if weighs_loading(self.problem):
            yield (
                "This plan was made in haste, for nobody is answered before it is loaded: it keeps to what the machines"
                " have loaded already. A faster one may follow."
            )
        yield from self._assumptions()

    def _why_not(self, index: int, now: int, then: int) -> str:
        """`now` is what the plan costs, `then` what it would with the node."""
        if reason := too_small(self.problem.costs[index]):
            return reason
        if not self.is_known:
            return "spare: the model fits without it"
        if then < now * (1 - NEAR) and len(self.path) == self.request.max_stages:
            return "the highest number of nodes that may be used is reached without it"
        if then < now * (1 - NEAR):
            return f"spare for now: it has too much to load, but would save {milliseconds(now - then)} of {self.token}"
        if then > now * (1 + NEAR) and then < VIOLATION:
            if self.for_throughput:
                return f"spare: the slowest machine would need {self._instead(now, then)}"
            longer = milliseconds(then - now)
            return f"spare: with it, {self.token} would take {longer} longer ({self._instead(now, then)})"
        return "spare: the model fits without it, and it would make nothing faster"

    def _speed(self) -> Iterator[str]:
        stages, wires = self._stage_times(self.problem.compute), self._wire_times(self.problem.wires)
        total, computing = self.head + sum(stages) + sum(wires), sum(stages)
        if self.for_throughput:
            busy = self._stage_times(self.problem.serve)
            slowest = max(range(len(busy)), key=busy.__getitem__)
            yield (
                f"The slowest machine is {self._name(slowest)}: it needs {milliseconds(busy[slowest])} for"
                f" {self.token}. So all answers together get at most {per_second(busy[slowest])} tokens a second, or"
                " more when many ask at once, since a machine computes several answers in one go."
            )
        between = f" and {milliseconds(sum(wires))} between them, without what the coordinator itself takes"
        if self.head:
            between = f", {milliseconds(sum(wires))} between them and {milliseconds(self.head)} in the coordinator"
        bound = "at most" if self._estimated else "about"
        yield (
            f"One answer alone gets {bound} {per_second(total)} tokens a second, which are {words(total)} words: a"
            f" token takes {milliseconds(total)}, {milliseconds(computing)} of it in the machines{between}."
        )
        if self.problem.prompt_shares:
            yield self._prompts(total)
        worst = max(range(len(wires)), key=wires.__getitem__)
        heaviest = max(range(len(stages)), key=stages.__getitem__)
        if len(stages) > 1 and not self.for_throughput and stages[heaviest] >= wires[worst]:
            _, start, end = stages_of(self.path)[heaviest]
            yield (
                f"What limits it most is {self._name(heaviest)}: its {end - start} layers take"
                f" {milliseconds(stages[heaviest])} of that."
            )
        yield from self._weakest_link(worst, wires[worst], total)

    def _prompts(self, total: int) -> str:
        stages, wires = self._stage_times(self.problem.serve), self._wire_times(self.problem.serving_wires)
        served = self.head + sum(stages) + sum(wires)
        rows, bound = self.request.prompt_rows, "no less than" if self._estimated else "about"
        return (
            f"A question of {round(1000 * WORDS)} words is read in {bound} {seconds((served - total) * 1000 / rows)}."
            f" Machines are compared by a token with its prompt: for each token of an answer {rows:g} of a question"
            f" are read, and together that takes {milliseconds(served)}."
        )

    def _weakest_link(self, index: int, nanoseconds: int, total: int) -> Iterator[str]:
        ends = (-1, *self.order, -1)[index : index + 2]
        names = [self.problem.nodes[end].node_id if end >= 0 else "the coordinator" for end in ends]
        told = f"The weakest connection is that of {names[0]} and {names[1]}: {milliseconds(nanoseconds)} for a token."
        cable = (CABLE_SECONDS + self.request.row_bytes / CABLE_SPEED) * NANOSECONDS
        back_and_forth = 2 if len(self.path) == 1 else 1
        saved = back_and_forth * (nanoseconds - cable)
        wire = self._wire(*ends)
        if wire and not wire.within_machine and saved >= max(WORTH * total, MIN_SAVED):
            yield f"{told} With a gigabit cable there, a token would take {instead(total, total - saved)}."
        elif wire and len(self.path) > 1:
            yield told

    def _why_so_many(self) -> Iterator[str]:
        if not self.is_known or len(self.path) > MAX_TRIED or len(self.problem.nodes) > MAX_AMONG:
            return
        now, needed, saves, costs = for_speed(self.problem).cost_of(self.path), [], [], []
        for node in self.order:
            others = tuple(each for index, each in enumerate(self._nodes) if index != node)
            without, name = self._best(others), self.problem.nodes[node].node_id
            if without is None:
                needed.append(name)
            elif without > now * (1 + NEAR):
                saves.append(f"without {name}, {self.token} would take {self._instead(now, without)}")
            elif without < now * (1 - NEAR):
                cost = milliseconds(now - without)
                costs.append(f"{name} costs {cost} of {self.token}, and is used because that was asked for")
        if needed:
            each = "Each of them" if len(needed) == len(self.path) else named(needed)
            is_needed = "is needed" if len(needed) in (1, len(self.path)) else "are needed"
            lost = "it" if len(needed) == 1 else "any one of them"
            yield f"{each} {is_needed}: without {lost} the model does not fit."
        if not self.for_throughput:
            yield from (f"{each[0].upper()}{each[1:]}." for each in saves)
            yield from (f"{each}." for each in costs)
            yield from self._alone(now)

    def _alone(self, now: int) -> Iterator[str]:
        """What the machine that would be fastest alone lacks for that."""
        total, alone = sum(self.request.layer_bytes), []
        for node in self.order:
            candidate = replace(self._nodes[node], memory=max(total, self._nodes[node].memory))
            if (cost := self._best((candidate,))) is not None:
                alone.append((cost, node))
        cost, node = min(alone, default=(now, -1))
        missing = self.problem.costs[node].takes[-1] - self.problem.nodes[node].memory
        if cost < now * (1 - NEAR) and missing > 0:
            yield (
                f"Several machines bring memory, and their connections cost time: with {at_least(missing)} more,"
                f" {self.problem.nodes[node].node_id} could hold the model alone, and {self.token} would take"
                f" {self._instead(now, cost)}."
            )

    def _more_memory(self) -> Iterator[str]:
        """What one more gigabyte would bring on the machine of the plan where it brings most."""
        now, best = for_speed(self.problem).cost_of(self.path), (NEVER, "")
        used = [self._nodes[node] for node in self.order]
        for node in used:
            more = tuple(replace(each, memory=each.memory + GB * (each is node)) for each in used)
            problem = Problem(replace(self.problem.as_if_known, candidates=more))
            few = len(used) <= MAX_TRIED
            cost = best_cost(problem) if few else for_speed(problem).cost(range(len(used)))
            best = min(best, (NEVER if cost is None else cost, node.node_id))
        if best[0] <= now * (1 - WORTH_A_GIGABYTE):
            whose = f"{self.token} on the slowest machine" if self.for_throughput else self.token
            yield f"One more gigabyte on {best[1]} would save {milliseconds(now - best[0])} of {whose}."

    def _assumptions(self) -> Iterator[str]:
        used = [self.problem.nodes[node] for node in self.order]
        unknown = [node.node_id for node in used if not node.row_seconds]
        if self.is_known and unknown:
            yield f"How fast {named(unknown)} computes is not known yet: it is taken to be as fast as the others."
        if self._estimated:
            yield (
                f"How long these layers take on {named(self._estimated)} was not measured yet: it is estimated by how"
                " fast the machine multiplies, and a token may take several times as long."
            )
        ends = [*pairwise((-1, *self.order, -1))]
        if self.is_known and not all(self._wire(*pair) for pair in ends):
            yield "Not all connections are known: one that is not is taken to be like the others, or 0.5 ms."

    @property
    def _estimated(self) -> list[str]:
        used = (self.problem.nodes[node] for node in self.order)
        return [node.node_id for node in used if node.estimated and node.row_seconds]

    def _best(self, candidates: tuple[Candidate, ...]) -> int | None:
        """For speed, of the best plan for these, whatever else was asked for; None if the model does not fit."""
        return best_cost(Problem(replace(self.problem.as_if_known, candidates=candidates, min_stages=1, pins={})))

    @property
    def _nodes(self) -> tuple[Candidate, ...]:
        return self.problem.as_if_known.candidates

    def _instead(self, now: int, then: int) -> str:
        """Of what plans cost, in which the coordinator's own part of a token is not."""
        own = 0 if self.for_throughput else self.head
        return instead(own + now, own + then)

    def _wire(self, one: int, other: int) -> Wire | None:
        """As it was measured; None if it was not."""
        ids = [self.problem.nodes[end].node_id if end >= 0 else COORDINATOR for end in (one, other)]
        return self.request.wire(*ids)

    def _name(self, stage: int) -> str:
        return self.problem.nodes[self.path[stage][0]].node_id

    def _stage_times(self, costs: Array) -> list[int]:
        return [int(costs[stage]) for stage in stages_of(self.path)]

    def _wire_times(self, costs: Array) -> list[int]:
        return [int(costs[ends]) for ends in pairwise((-1, *self.order, -1))]
