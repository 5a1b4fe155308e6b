"""The one thread in which a stage computes, so that the event loop never does."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    done: trio.Event = field(default_factory=trio.Event)
    result: outcome.Outcome[Any] | None = None
    abandoned: bool = False


class ComputeThread:
    """Runs calls one after another in its own thread. Made by `open_compute_thread`."""

    def __init__(self, token: trio.lowlevel.TrioToken, name: str) -> None:
        self._token = token
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended = trio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)`'s result or exception. If cancelled, a call that has begun is left to end by itself."""
        job = _Job(lambda: call(*args))
        self._jobs.put(job)
        try:
            await job.done.wait()
        except trio.Cancelled:
            job.abandoned = True
            raise
        assert job.result is not None
        return job.result.unwrap()  # type: ignore[no-any-return]

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.abandoned:
                continue
            job.result = outcome.capture(job.call)
            self._tell(job.done)
            del job
        self._tell(self._ended)

    def _tell(self, event: trio.Event) -> None:
        try:
            self._token.run_sync_soon(event.set)
        except trio.RunFinishedError:
            return


@asynccontextmanager
async def open_compute_thread(name: str, *, grace: float = 5.0) -> AsyncIterator[ComputeThread]:
    """A compute thread for the length of the block. A call still running at its end has `grace` seconds left."""
    thread = ComputeThread(trio.lowlevel.current_trio_token(), name)
    thread._thread.start()
    try:
        yield thread
    finally:
        thread._jobs.put(None)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
            await thread._ended.wait()
