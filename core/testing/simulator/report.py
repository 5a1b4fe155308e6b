"""What a simulation shows, as figures and as text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.testing.simulator.load import Stream

FEW = 20
"""Machines that are each told of."""


@dataclass(frozen=True, slots=True)
class Report:
    """Of the time from the first request to the last token, `seconds` long. `ready_after` seconds passed before that.

    `layers` are those of each node of the last route, in its order; `busy` says for each machine, the coordinator's
    included, which part of the time it computed. `outages` are the seconds for which generations had no route.
    """

    title: str
    streams: Sequence[Stream]
    seconds: float
    ready_after: float
    layers: Mapping[str, range]
    busy: Mapping[str, float]
    left_out: Mapping[str, str]
    routes: int
    recoveries: int
    outage_seconds: float

    @property
    def answered(self) -> list[Stream]:
        """Those that got more than one token."""
        return [stream for stream in self.streams if len(stream.tokens) > 1]

    @property
    def failed(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.is_whole]

    @property
    def throughput(self) -> float:
        """Tokens per second of all streams together."""
        return sum(len(stream.tokens) for stream in self.streams) / self.seconds if self.seconds else 0.0

    @property
    def steady_throughput(self) -> float:
        """Of all streams together, while all of them decode: from the last one's first token to the first one's end."""
        began = max(stream.tokens[0] for stream in self.answered)
        ended = min(stream.tokens[-1] for stream in self.answered)
        decoded = sum(began < at <= ended for stream in self.answered for at in stream.tokens)
        return decoded / (ended - began)

    def __str__(self) -> str:
        return "\n".join([*self._heading(), *self._figures(), *self._machines()])

    def _heading(self) -> list[str]:
        return [self.title] if self.title else []

    def _figures(self) -> list[str]:
        answered, failed = self.answered, self.failed
        lines = [
            f"  ready after     {self.ready_after:.1f} s, over {len(self.layers)} machines",
            f"  answers         {len(self.streams) - len(failed)} whole, {len(failed)} cut, in {self.seconds:.1f} s",
        ]
        if answered:
            lines += [
                f"  throughput      {self.throughput:.2f} tokens/s",
                f"  one stream      {_spread([stream.rate for stream in answered])} tokens/s",
                f"  first token     {_spread([stream.ttft for stream in answered])} s",
                f"  longest gap     {_spread([stream.longest_gap for stream in answered])} s",
            ]
        if self.routes > 1:
            lines += [
                f"  routes          {self.routes}",
                f"  recoveries      {self.recoveries}, {self.outage_seconds:.1f} s without a route in all",
            ]
        lines += [f"  error           {error}" for error in sorted({stream.error for stream in failed} - {""})]
        return lines

    def _machines(self) -> list[str]:
        lines = [
            f"  {name:<15} layers [{layers.start}, {layers.stop}), busy {self.busy[name]:.0%}"
            for name, layers in self.layers.items()
        ]
        if len(lines) > FEW:
            lines = [f"  on the route    busy {_spread([100 * self.busy[name] for name in self.layers], 0)} %"]
        others = {name: part for name, part in self.busy.items() if name not in self.layers and part}
        lines += [f"  {name:<15} busy {part:.0%}" for name, part in others.items()]
        reasons = Counter(self.left_out.values())
        return lines + [f"  left out        {count}: {reason}" for reason, count in reasons.items()]


def _spread(values: Sequence[float], digits: int = 2) -> str:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    figures = {"median": statistics.median(ordered), "min": ordered[0], "p95": p95, "max": ordered[-1]}
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in figures.items())
