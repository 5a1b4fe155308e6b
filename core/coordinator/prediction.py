"""What a plan is predicted to bring: how long a token takes, and how long a context it has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.interfaces.planner import Candidate, Plan, PlanRequest

BETTER = 0.15
"""The part of a token's time that a plan has to save before it takes the place of one that serves."""
MIN_SAVING_SECONDS = 0.002
"""Seconds of a token's time: less than that is within what measuring speeds and links is off by."""
LONGER = 1.5
"""How many times the context it has to have room for."""
HOP_SECONDS = 0.001
"""What a hop costs a token beside computing, if its link was not measured."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """`token_seconds` of one stream; 0 if a node's speed is not known. `context` in tokens."""

    token_seconds: float
    context: int


def predict(
    plan: Plan, candidates: Sequence[Candidate], request: PlanRequest, kv_layer_bytes: int, longest: int
) -> Prediction:
    """One token leaves `kv_layer_bytes` in a layer's cache, and the model itself takes `longest` tokens.

    The memory of `candidates` is what they offer for layers and caches if nothing else is on them. Each stage reads its
    weights once for a token, at the speed of its node.
    """
    by_id = {candidate.node_id: candidate for candidate in candidates}
    seconds, known, context = 0.0, True, longest
    for stage in plan.stages:
        node, layers = by_id[stage.node_id], range(stage.start, stage.end)
        weights = sum(request.weight_bytes[layer] for layer in layers)
        known = known and node.speed > 0
        seconds += (weights / node.speed if node.speed else 0.0) + (node.round_trip / 2 or HOP_SECONDS)
        if kv_layer_bytes:
            context = min(context, max(0, node.memory - weights) // (kv_layer_bytes * len(layers)))
    return Prediction(seconds if known else 0.0, context)


def gain(new: Prediction, old: Prediction) -> str:
    """In what `new` is so much better that it should take the place of `old`; empty if in nothing, or worse in either.

    A plan that gains in one must not lose as much in the other: so of two plans at most one is better than the other.
    """
    faster = 0 < new.token_seconds <= min((1 - BETTER) * old.token_seconds, old.token_seconds - MIN_SAVING_SECONDS)
    slower = new.token_seconds > old.token_seconds / (1 - BETTER) > 0
    longer = new.context >= LONGER * max(1, old.context)
    shorter = LONGER * new.context <= old.context
    if faster and not shorter:
        return (
            f"a token is predicted to take {1000 * new.token_seconds:.3g} ms instead of {1000 * old.token_seconds:.3g}"
        )
    if longer and not slower:
        return f"it has room for {new.context} tokens of context instead of {old.context}"
    return ""
