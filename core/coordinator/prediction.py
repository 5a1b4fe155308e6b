"""What a plan is predicted to bring: how long a token takes, and how long a context it has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from core.interfaces.planner import CHUNK_ROWS, COORDINATOR, Plan, PlanFor, PlanRequest, Wire
from core.runtime.session_cost import longest_session

BETTER = 0.15
"""The part of a token's time that a plan has to save before it takes the place of one that serves."""
MIN_SAVING_SECONDS = 0.002
"""Seconds of a token's time: less than that is within what measuring speeds and links is off by."""
LONGER = 1.5
"""How many times the context it has to have room for."""
WIRE_SECONDS = 0.0005
"""What a wire costs a token, if it was not measured."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """`token_seconds` of one stream, `stage_seconds` of its slowest stage; 0 if a node's speed is not known.

    `prompt_seconds` are what the rows of prompts that come with a token add to it, and are part of `stage_seconds`; 0
    if some node has timed no prompts. `context` in tokens.
    """

    token_seconds: float
    context: int
    stage_seconds: float = 0.0
    prompt_seconds: float = 0.0

    @property
    def served_seconds(self) -> float:
        """Of a token with its share of the prompt."""
        return self.token_seconds + self.prompt_seconds


def predict(
    plan: Plan,
    request: PlanRequest,
    session_cost: Callable[[range], Callable[[int], int]],
    longest: int,
    head_seconds: float = 0.0,
) -> Prediction:
    """`session_cost` tells of layers what a session's caches take in them, in bytes, by the tokens that they have room
    for; the model itself takes `longest` tokens.

    `head_seconds` is what the coordinator itself takes for it: embedding, head, sampling.
    The memory of candidates is what they offer for layers and caches if nothing else is on them.
    """
    by_id = {candidate.node_id: candidate for candidate in request.candidates}
    used = [(by_id[stage.node_id], slice(stage.start, stage.end)) for stage in plan.stages]
    for node, layers in used:
        free = node.memory - sum(request.weight_bytes[layers])
        longest = min(longest, longest_session(session_cost(range(layers.start, layers.stop)), free))
    if not all(node.row_seconds for node, _ in used):
        return Prediction(0.0, longest)
    chunks = request.prompt_rows / CHUNK_ROWS if all(node.chunk_seconds for node, _ in used) else 0.0
    rows = [sum(node.row_seconds[layers]) for node, layers in used]
    prompts = [chunks * sum(node.chunk_seconds[layers]) for node, layers in used]
    wires = wires_of(plan, request)
    return Prediction(
        head_seconds + sum(rows) + sum(wire.takes(request.row_bytes) for wire in wires),
        longest,
        max(map(sum, zip(rows, prompts, strict=True))),
        sum(prompts) + chunks * sum(wire.takes(CHUNK_ROWS * request.row_bytes) for wire in wires),
    )


def wires_of(plan: Plan, request: PlanRequest) -> list[Wire]:
    """The wires of the route, from the coordinator and back to it.

    If one of them was not measured, all count alike: a wire that was measured and one that was not can't be compared.
    """
    machines = [COORDINATOR, *(stage.node_id for stage in plan.stages), COORDINATOR]
    wires = [request.wire(*pair) for pair in pairwise(machines)]
    known = [wire for wire in wires if wire is not None]
    return known if len(known) == len(wires) else [Wire(WIRE_SECONDS)] * len(wires)


def gain(new: Prediction, old: Prediction, plan_for: PlanFor = PlanFor.LATENCY) -> str:
    """In what `new` is so much better that it should take the place of `old`; empty if in nothing, or worse in either.

    A plan that gains in one must not lose as much in the other: so of two plans at most one is better than the other.
    """
    one_stream = plan_for is PlanFor.LATENCY
    now, then = (each.served_seconds if one_stream else each.stage_seconds for each in (old, new))
    faster = 0 < then <= min((1 - BETTER) * now, now - MIN_SAVING_SECONDS)
    slower = then > now / (1 - BETTER) > 0
    longer = new.context >= LONGER * max(1, old.context)
    shorter = LONGER * new.context <= old.context
    if faster and not shorter:
        what = "the slowest stage" if not one_stream else "a token with its prompt" if new.prompt_seconds else "a token"
        return f"{what} is predicted to take {1000 * then:.3g} ms instead of {1000 * now:.3g}"
    if longer and not slower:
        return f"it has room for {new.context} tokens of context instead of {old.context}"
    return ""
