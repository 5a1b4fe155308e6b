"""The one thread in which a stage computes, so that the event loop never does."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import outcome
import trio

from core.errors import CoreError

SWITCH_SECONDS = 0.0005
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Job(Generic[T]):
    """A call for a compute thread, which `start` hands over. `done` is set when it has returned."""

    def __init__(self, queue: SimpleQueue[Job[Any] | None], call: Callable[..., T], done: trio.Event) -> None:
        self._queue = queue
        self._call = call
        self._args: tuple[Any, ...] = ()
        self._done = done
        self._result: outcome.Outcome[T] | None = None
        self._abandoned = False

    def start(self, *args: Any) -> None:
        """Hands `call(*args)` over, behind those that were handed over before."""
        self._args = args
        self._queue.put(self)
        time.sleep(0)  # the compute thread gets the interpreter now, not when the event loop next waits

    async def wait(self) -> T:
        """The call's result or exception. If cancelled, a call that has begun is left to end by itself."""
        try:
            await self._done.wait()
        except trio.Cancelled:
            self.abandon()
            raise
        assert self._result is not None
        return self._result.unwrap()

    def abandon(self) -> None:
        """A call that has not begun never does."""
        self._abandoned = True

    def run(self, tell: Callable[[trio.Event], None]) -> None:
        """In the compute thread."""
        if not self._abandoned:
            self._result = outcome.capture(self._call, *self._args)
            tell(self._done)


async def explained(job: Job[T], failed: str, say: Callable[[BaseException], CoreError]) -> T:
    """The job's result. Torch and plugins may raise anything in it: that is logged as `failed`, and told as `say` says.

    So one load, batch or build fails, and not the process.
    """
    try:
        return await job.wait()
    except CoreError:
        raise
    except (Exception, SystemExit) as error:
        _log.exception(failed)
        raise say(error) from error


class ComputeThread:
    """Runs calls one after another in its own thread. Made by `open_compute_thread`."""

    def __init__(self, token: trio.lowlevel.TrioToken, name: str) -> None:
        self._token = token
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._ended = trio.Event()
        self._computes = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether somebody's call runs or waits."""
        return self._computes or not self._jobs.empty()

    def start(self, call: Callable[..., T], *args: Any) -> Job[T]:
        """Hands `call(*args)` over, behind those that were handed over before."""
        job = self.job(call, trio.Event())
        job.start(*args)
        return job

    def job(self, call: Callable[..., T], done: trio.Event) -> Job[T]:
        """To be started later."""
        return Job(self._jobs, call, done)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """`start`, and the job's `wait`."""
        return await self.start(call, *args).wait()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._computes = True
            job.run(self._tell)
            self._computes = False
            del job
        self._tell(self._ended)

    def _tell(self, event: trio.Event) -> None:
        self._computes = False  # before anybody hears of it, who may ask
        try:
            self._token.run_sync_soon(event.set)
        except trio.RunFinishedError:
            return


@asynccontextmanager
async def open_compute_thread(name: str, *, grace: float = 5.0) -> AsyncIterator[ComputeThread]:
    """A compute thread for the length of the block. A call still running at its end has `grace` seconds left.

    Python code in it would hold the interpreter for 5 ms at a time while messages wait: the process switches sooner.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = ComputeThread(trio.lowlevel.current_trio_token(), name)
    thread._thread.start()
    try:
        yield thread
    finally:
        thread._jobs.put(None)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
            await thread._ended.wait()
