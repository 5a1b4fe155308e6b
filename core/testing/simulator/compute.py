"""The coordinator's compute thread, without a thread: its calls take time of trio's clock."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import trio

from core.protocol.messages import HiddenState
from core.runtime.compute import ComputeThread, Job
from core.testing.simulator.description import Times, milliseconds


class _Jobs(SimpleQueue[Job[Any] | None]):
    """Hands jobs to a task."""

    def __init__(self) -> None:
        self._put, self.received = trio.open_memory_channel[Job[Any]](float("inf"))

    def put(self, job: Job[Any] | None, block: bool = True, timeout: float | None = None) -> None:
        assert job is not None
        self._put.send_nowait(job)


class SimulatedCompute(ComputeThread):
    """`run_jobs` in a task. Rows that come back take what `head_ms` says of so many; all other calls take nothing.

    `busy` counts the seconds of all calls.
    """

    def __init__(self, head_ms: Times) -> None:
        self.busy = 0.0
        self._head_ms = head_ms
        self._jobs = jobs = _Jobs()
        self._received = jobs.received

    async def run_jobs(self) -> None:
        async for job in self._received:
            seconds = self._seconds(job._args)
            self.busy += seconds
            await trio.sleep(seconds)
            job.run(trio.Event.set)

    def _seconds(self, args: Sequence[Any]) -> float:
        match args:
            case (HiddenState(hidden=hidden),):
                return milliseconds(self._head_ms, hidden.rows) / 1000 if hidden.rows else 0.0
            case _:
                return 0.0
