"""The seam for planners: which node gets which layer range, with the reasons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the planner sees it: `memory` is what it offers for layers and their KV caches, in bytes.

    `speed` is how many bytes of weights it was measured to multiply with one row in a second, `round_trip` how many
    seconds a message to it and its answer take; 0 where that is not known. `held` are the layers that it has in memory
    already: it need not load them. Of these, `pinned` serve another route, and stay whatever the plan is: their weights
    are not in `memory`, so each takes what its KV cache takes alone.
    """

    node_id: str
    memory: int
    device: str
    speed: float = 0.0
    round_trip: float = 0.0
    held: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`layer_bytes[i]` is what layer i takes on a node: packed weights and the KV cache that is set aside for it.

    `weight_bytes[i]` is its weights' part of that. `min_stages` and `max_stages` bound how many nodes are used
    (`max_stages` None: no bound). Candidates come in the order in which they joined. `in_haste`: nobody is served until
    the plan is loaded, so what has to be loaded for it counts first.
    """

    layer_bytes: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    min_stages: int = 1
    max_stages: int | None = None
    weight_bytes: tuple[int, ...] = ()
    in_haste: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers `[start, end)` on `node_id`, taking `nbytes` of it."""

    node_id: str
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in order, together every layer once; and why a candidate was left out, by its id."""

    stages: tuple[StagePlan, ...]
    left_out: tuple[tuple[str, str], ...] = ()


class Planner(ABC):
    name: ClassVar[str]

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Deterministic. Raises PlanError, with the bytes that are missing, where the layers do not fit."""
