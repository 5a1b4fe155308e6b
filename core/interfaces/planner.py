"""The seam for planners: which node gets which layer range, with the reasons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

COORDINATOR = ""
"""What stands for the coordinator at the end of a wire."""
CHUNK_ROWS = 256
"""Rows of a prompt that `Candidate.chunk_seconds` is the time of."""


class PlanFor(StrEnum):
    """What a plan is to make short: a token's time in one stream, or the time of the slowest stage."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Wire:
    """Between two ends: `seconds` that a small message takes one way, and bytes per second (0: not known).

    `within_machine`: both ends are known to be on one machine.
    """

    seconds: float
    bandwidth: float = 0.0
    within_machine: bool = False

    def takes(self, nbytes: int) -> float:
        """Seconds that so many bytes take one way."""
        return self.seconds + (nbytes / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the planner sees it: `memory` is what it offers for layers and their KV caches, in bytes.

    `row_seconds[i]` is how long one row takes through layer i on it, `chunk_seconds[i]` how long CHUNK_ROWS of a prompt
    take; both are empty if its speed is not known. They are `estimated` if it timed none of the layers, but how fast it
    multiplies, which promises much. `held` are the layers that it has in memory already: it need not
    load them. Of these, `pinned` serve another route, and stay whatever the plan is: their weights are not in
    `memory`, so each takes what its KV cache takes alone. `on_disk` are layers that it has read before, so that it
    need not download them; it loads `load_speed` bytes a second from there (0: not known). `labels` are its owner's
    words for it.
    """

    node_id: str
    memory: int
    device: str
    row_seconds: tuple[float, ...] = ()
    chunk_seconds: tuple[float, ...] = ()
    held: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    load_speed: float = 0.0
    labels: frozenset[str] = frozenset()
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`layer_bytes[i]` is what layer i takes on a node: packed weights and the KV cache that is set aside for it.

    `weight_bytes[i]` is its weights' part of that. `min_stages` and `max_stages` bound how many nodes are used
    (`max_stages` None: no bound). Candidates come in the order in which they joined, which is to decide nothing.
    `in_haste`: nobody is served until the plan is loaded, so the seconds of loading count too.

    `row_bytes` is what one row of hidden states takes on a wire. `wires` are those that were measured, by the ids of
    their two ends in either order, the coordinator's being COORDINATOR. `pins` are layers that a node must have.
    `prompt_rows` is how many rows of prompts are computed for each row that is decoded. `head_seconds` is what a token
    takes in the coordinator itself, whatever the plan: embedding, head, sampling (0: not known).
    """

    layer_bytes: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    min_stages: int = 1
    max_stages: int | None = None
    weight_bytes: tuple[int, ...] = ()
    in_haste: bool = False
    plan_for: PlanFor = PlanFor.LATENCY
    row_bytes: int = 0
    wires: Mapping[tuple[str, str], Wire] = field(default_factory=dict)
    pins: Mapping[str, range] = field(default_factory=dict)
    prompt_rows: float = 0.0
    head_seconds: float = 0.0

    def wire(self, one: str, other: str) -> Wire | None:
        """Between two nodes, or a node and COORDINATOR; None if nothing is known of it.

        A wire that was not measured is taken to be as slow as the slower of the two nodes' wires to the coordinator.
        """
        if one == other:
            return Wire(0.0)
        for ends in ((one, other), (other, one)):
            if ends in self.wires:
                return self.wires[ends]
        if COORDINATOR in (one, other):
            return None
        by_coordinator = [self.wire(each, COORDINATOR) for each in (one, other)]
        known = [wire for wire in by_coordinator if wire is not None]
        if len(known) < len(by_coordinator):
            return None
        bandwidths = [wire.bandwidth for wire in known if wire.bandwidth]
        within_machine = all(wire.within_machine for wire in known)
        return Wire(max(wire.seconds for wire in known), min(bandwidths, default=0.0), within_machine)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers `[start, end)` on `node_id`, taking `nbytes` of it."""

    node_id: str
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in order, together every layer once; why a candidate was left out, by its id; and what there is to say.

    A node may have several stages, with others' between them: the first and the last layers, for instance.
    `notes` are sentences for the people of the cluster: what limits its speed, what a machine costs or saves.
    """

    stages: tuple[StagePlan, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


class Planner(ABC):
    name: ClassVar[str]

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Deterministic. Raises PlanError, with the bytes that are missing, where the layers do not fit."""
