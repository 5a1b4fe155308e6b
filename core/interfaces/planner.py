"""The seam for planners: which node gets which layer range, with the reasons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the planner sees it: `memory` is what it offers for layers and their KV caches, in bytes."""

    node_id: str
    memory: int
    device: str


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`layer_bytes[i]` is what layer i takes on a node: packed weights and the KV cache that is set aside for it.

    `min_stages` and `max_stages` bound how many nodes are used (`max_stages` None: no bound).
    Candidates come in the order in which they joined.
    """

    layer_bytes: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    min_stages: int = 1
    max_stages: int | None = None


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
