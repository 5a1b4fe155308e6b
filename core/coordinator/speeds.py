"""How long each layer takes each member: as it was timed, or by what stands in for that, within what can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.coordinator.members import Member
from core.protocol.fields import LayerTime
from core.runtime.layer_costs import LayerCost, layer_costs
from core.runtime.model import Model, Precision

MAX_READ_SPEED = 2e13
"""Bytes of weights in a second: no device reads as many, whatever a node says of itself."""
MAX_SECONDS = 3600.0
"""Of one layer."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """`costs` are those of the model's layers."""

    costs: tuple[LayerCost, ...]

    @classmethod
    def of(cls, model: Model, precision: Precision) -> Speeds:
        return cls(layer_costs(model, range(model.spec.layers), precision, precision.quantizer.name))

    def row_seconds(self, member: Member) -> tuple[float, ...]:
        """Of one row in each layer; empty if nothing is known. A member is as slow as it has been seen to be."""
        told = self._seconds(member, lambda time: time.row_ns, member.hello.speed)
        return tuple(seconds + member.excess * cost.read_bytes for seconds, cost in zip(told, self.costs, strict=False))

    def chunk_seconds(self, member: Member) -> tuple[float, ...]:
        """Of CHUNK_ROWS rows in each layer, which take no less than one; empty if nothing is known."""
        told = self._seconds(member, lambda time: time.chunk_ns, member.hello.chunk_speed)
        return tuple(map(max, told, self.row_seconds(member))) if self.row_seconds(member) else told

    def estimated(self, member: Member) -> bool:
        """Whether it is known by what stands in for layers' times alone, for it has timed none of them."""
        kinds = {cost.kind for cost in self.costs}
        timed = any(time.row_ns and time.kind in kinds for time in member.reported.layer_times)
        return not timed and bool(member.hello.speed)

    def timed(self, member: Member, layers: range) -> float:
        """What a row takes in all of `layers`; 0 if the member has not timed every kind of them."""
        known = {time.kind for time in member.reported.layer_times if time.row_ns}
        if not all(self.costs[layer].kind in known for layer in layers):
            return 0.0
        return sum(self.row_seconds(member)[layers.start : layers.stop])

    def read_bytes(self, layers: range) -> int:
        return sum(cost.read_bytes for cost in self.costs[layers.start : layers.stop])

    def _seconds(self, member: Member, ns: Callable[[LayerTime], int], stand_in: int) -> tuple[float, ...]:
        """Layers that were not timed take as long for a byte as those that were, or as the `stand_in` says."""
        timed = {time.kind: ns(time) / 1e9 for time in member.reported.layer_times if ns(time)}
        rate = _seconds_per_byte(timed, self.costs) or (1 / stand_in if stand_in else 0.0)
        if not rate:
            return ()
        return tuple(_possible(timed.get(cost.kind, rate * cost.read_bytes), cost) for cost in self.costs)


def _seconds_per_byte(timed: Mapping[bytes, float], costs: Sequence[LayerCost]) -> float:
    known = {cost.kind: cost.read_bytes for cost in costs if cost.kind in timed}
    read = sum(known.values())
    return sum(timed[kind] for kind in known) / read if read else 0.0


def _possible(seconds: float, cost: LayerCost) -> float:
    return min(max(seconds, cost.read_bytes / MAX_READ_SPEED), MAX_SECONDS)
