"""Trio's clock, and no other: what measures time measures that of the simulation, and nothing waits for a thread."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

TICK_SECONDS = 2.0**-20
TOLD_THE_TIME = ("core.link", "core.runtime.compute", "core.coordinator.")
"""Modules of the product that go by the module `time`."""
T = TypeVar("T")


class SimulatedTime(ModuleType):
    """In place of the module `time`: durations are of trio's clock, dates are the real ones."""

    def __init__(self) -> None:
        super().__init__("time")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return trio.current_time()

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return round(trio.current_time() * 1e9)

    perf_counter_ns = monotonic_ns

    def sleep(self, seconds: float) -> None:
        """Only a thread would be given the time."""


@contextmanager
def simulated_time(seed: int) -> Iterator[None]:
    """Around `trio.run` with a clock that is `put_forward`. The same `seed` brings the same order of tasks.

    A call for one of trio's threads is made at once: the clock would go on while the thread works.
    Trio shuffles the tasks that are ready: it keeps the order from one run to the next if asked to, as Hypothesis does.
    """
    scheduler: Any = sys.modules["trio._core._run"]
    state = scheduler._r.getstate()
    with ExitStack() as stack:
        stack.enter_context(patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        stack.callback(scheduler._r.setstate, state)
        scheduler._r.seed(seed)
        stack.enter_context(patch.object(trio.to_thread, "run_sync", _at_once))
        for name, module in list(sys.modules.items()):
            if name.startswith(TOLD_THE_TIME) and getattr(module, "time", None) is time:
                stack.enter_context(patch.object(module, "time", SimulatedTime()))
        yield


async def put_forward(clock: MockClock) -> None:
    """Run it in a system task: when all others wait, the clock goes on to the next deadline, rounded up to a tick.

    So differences of times are exact. A loop that sleeps for what is left of some time would not end if rounding left
    it a little which is too little to add to the time: a clock that stands still never makes up for that.
    """
    while True:
        await wait_all_tasks_blocked()
        now = trio.current_time()
        due = now + trio.lowlevel.current_statistics().seconds_to_next_deadline
        assert due < math.inf, "nobody waits for a time"
        clock.jump(math.ceil(due / TICK_SECONDS) * TICK_SECONDS - now)


async def _at_once(call: Callable[..., T], *args: Any, **_: Any) -> T:
    await trio.lowlevel.checkpoint()
    return call(*args)
