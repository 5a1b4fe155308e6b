"""How long layers take on this machine: those at hand are timed, and what was found is kept for the next process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import StageError
from core.interfaces.planner import CHUNK_ROWS
from core.runtime.compute import ComputeThread, explained
from core.runtime.device import device_name, synchronize
from core.runtime.kept_file import KeptFile
from core.runtime.kernel_times import machine
from core.runtime.kv_cache import CacheStore, SegmentBatch
from core.runtime.layer_costs import LayerCost
from core.runtime.stage import Stage

FAILED = "the layers could not be timed"
WARM_ROWS = 16
_TRIES, _TRY_SECONDS, _TRY_ROWS = 3, 0.05, 32
"""In each try rows for so long, or so many: a system lets short work go first, and what follows pays for it."""
_CHUNK_TRIES = 2
_BUSY_SECONDS = 0.1
"""How long the compute thread may be kept from others at once, as far as that is known beforehand."""
_REMEMBERED = 256
"""Kinds of layers, of one machine."""
_ByMachine = dict[str, dict[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds for one row, and for CHUNK_ROWS rows of a prompt (0: not known)."""

    row: float
    chunk: float


TimesByKind = dict[bytes, Times]


def by_kind(whole: Times, costs: Sequence[LayerCost]) -> TimesByKind:
    """What layers took together, shared among their kinds by how much a row reads of each."""
    read = sum(cost.read_bytes for cost in costs)
    return {
        cost.kind: Times(whole.row * cost.read_bytes / read, whole.chunk * cost.read_bytes / read)
        for cost in costs
        if read
    }


class KeptTimes:
    """Times by kind of layer, those that were noted last at the end."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        """Without a `path`, they are kept in the user's cache, for this `device` with as many threads."""
        self._file: KeptFile[_ByMachine] = KeptFile("layers.json", _ByMachine, path)
        self._machine = f"{machine()}, {device_name(device)}, {torch.get_num_threads()} threads"
        kept = (self._file.read() or {}).get(self._machine, {})
        self.by_kind = {bytes.fromhex(kind): Times(*times) for kind, times in kept.items() if _are_times(*times)}
        self._idle = dict(self.by_kind)

    def find(self, found: Mapping[bytes, Times]) -> None:
        """Layers were timed while nobody was served."""
        self._idle.update(found)
        self.note(found)

    def note(self, found: Mapping[bytes, Times]) -> None:
        """Serving has shown it, for as long as this process lives."""
        for kind, times in found.items():
            before = self.by_kind.pop(kind, Times(0.0, 0.0))
            self.by_kind[kind] = Times(times.row or before.row, times.chunk or before.chunk)

    def forget_serving(self) -> bool:
        """What was found while nobody was served holds again. Whether that is something else."""
        before = dict(self.by_kind)
        self.by_kind.update(self._idle)
        return self.by_kind != before

    def keep(self, found: Mapping[bytes, Times]) -> None:
        """For later ones too. It writes a file."""
        told = {kind.hex(): (times.row, times.chunk) for kind, times in found.items()}
        machines = self._file.read() or {}
        others = {kind: times for kind, times in machines.get(self._machine, {}).items() if kind not in told}
        self._file.write({**machines, self._machine: dict(list({**others, **told}.items())[-_REMEMBERED:])})


def _are_times(row: float, chunk: float) -> bool:
    return all(math.isfinite(seconds) and seconds >= 0 for seconds in (row, chunk)) and row > 0


async def time_stage(compute: ComputeThread, stage: Stage, width: int) -> Times | None:
    """What the layers of `stage` take, for rows of no session: the least of a few tries, for others may be busy here.

    Who is busy all the time is so in each of them. None if somebody else needs the thread meanwhile.

    It is kept from them for the time of one row, or for a few rows of a prompt, at once. Raises StageError for a stage
    that can't compute.
    """

    async def seconds(rows: int) -> float:
        return await explained(compute.start(trial.seconds, rows), FAILED, _failed)

    trial, rows = Trial(stage, width), list[float]()
    if compute.is_busy:
        return None
    await seconds(WARM_ROWS)  # kernels are chosen, memory is taken
    for _ in range(_TRIES):
        several = list[float]()
        while sum(several) < _TRY_SECONDS and len(several) < _TRY_ROWS:
            if compute.is_busy:
                return None
            several.append(await seconds(1))
        rows.append(statistics.mean(several))
    few = await seconds(WARM_ROWS)
    many = max(WARM_ROWS, min(CHUNK_ROWS, int(WARM_ROWS * _BUSY_SECONDS / few)))
    chunks = []
    for _ in range(_CHUNK_TRIES):
        if compute.is_busy:
            return None
        chunks.append(await seconds(many))
    return Times(min(rows), min(chunks) * CHUNK_ROWS / many)


def _failed(error: BaseException) -> StageError:
    return StageError(FAILED, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: int
    session: int = 0
    position: int = 0

    @property
    def outputs(self) -> int:
        return self.rows


class Trial:
    """Passes made-up rows through the layers of `stage`, whose own caches it leaves alone."""

    def __init__(self, stage: Stage, width: int) -> None:
        self._stage = stage
        self._width = width

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """For `rows` that begin a session. In the compute thread."""
        stage, generator = self._stage, torch.Generator().manual_seed(rows)
        # Each row is another one, so that the rows of a chunk choose different experts.
        hidden = torch.randn(rows, self._width, generator=generator).to(stage.device, stage.residual_dtype)
        batch = SegmentBatch([_Rows(rows)], CacheStore(stage.layers), stage.device)
        synchronize(stage.device)
        started = time.perf_counter()
        stage.stack(hidden, batch)
        synchronize(stage.device)
        return max(time.perf_counter() - started, 1e-9)
