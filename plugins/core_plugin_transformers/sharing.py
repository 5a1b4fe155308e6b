"""Whether a family's code computes in one pass of several sessions what it computes of each alone.

Sessions of different lengths lie side by side behind padding, which not every family's code leaves out of account. So
two made-up sessions are computed both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from core import Batch, SessionState

PROMPTS = (3, 11)
"""Rows of the two sessions: so different that padding which is not left out shows."""
BOUND = 0.1
"""How far what the layers add may be from what they add to each alone, relative to its length: more than rounding, or
a token that goes to another expert, but less than a row of padding."""


@dataclass
class Session:
    state: dict[str, SessionState] = field(default_factory=dict)
    cached: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True)
class _Segment:
    rows: slice
    start: int
    session: Session

    @property
    def state(self) -> dict[str, SessionState]:
        return self.session.state


class MadeUpBatch:
    """A Batch over sessions of its own, as far as a stack of this architecture uses it."""

    def __init__(self, sessions: Sequence[Session], rows: int, device: torch.device) -> None:
        """Each of `sessions` goes on by as many `rows`."""
        self.segments = [
            _Segment(slice(index * rows, (index + 1) * rows), session.length, session)
            for index, session in enumerate(sessions)
        ]
        starts = [session.length for session in sessions]
        self.positions = torch.cat([torch.arange(start, start + rows, device=device) for start in starts])

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None = None) -> list[tuple[Tensor, Tensor]]:
        return [self._extended(segment, layer, k[segment.rows], v[segment.rows], window) for segment in self.segments]

    def _extended(
        self, segment: _Segment, layer: int, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        new = k.transpose(0, 1), v.transpose(0, 1)
        before = segment.session.cached.get(layer, (new[0][:, :0], new[1][:, :0]))
        keys, values = (
            torch.cat((old[:, : segment.start], rows), dim=1) for old, rows in zip(before, new, strict=True)
        )
        segment.session.cached[layer] = keys, values
        first = 0 if window is None else max(0, segment.start + 1 - window)
        return keys[:, first:], values[:, first:]


def share_passes(run: Callable[[Tensor, Batch], Tensor], width: int, device: torch.device) -> bool:
    """`run` computes rows [rows, width] in float32 of a batch in one pass. Never raises."""
    generator = torch.Generator().manual_seed(0)
    sessions, made_up = [Session() for _ in PROMPTS], [_rows(rows, width, device, generator) for rows in PROMPTS]
    step = _rows(len(sessions), width, device, generator)

    def ran(rows: Tensor, of: Sequence[Session]) -> Tensor:
        return run(rows, cast(Batch, MadeUpBatch(of, len(rows) // len(of), device)))

    # A family's own code meets several sessions, which it may not expect.
    try:
        for session, prompt in zip(sessions, made_up, strict=True):
            ran(prompt, [session])
            session.length = len(prompt)
        together = ran(step, copy.deepcopy(sessions))
        alone = torch.cat([ran(step[index : index + 1], [each]) for index, each in enumerate(sessions)])
    except Exception:
        return False
    return bool((together - alone).norm() < BOUND * (alone - step).norm())


def _rows(count: int, width: int, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randn(count, width, generator=generator).to(device)
