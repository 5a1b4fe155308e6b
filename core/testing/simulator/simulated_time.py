"""Trio's clock, and no other: what measures time measures that of the simulation, and nothing waits for a thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import trio

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
    """Around `trio.run` with a MockClock. The same `seed` brings the same order of tasks.

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


async def _at_once(call: Callable[..., T], *args: Any, **_: Any) -> T:
    await trio.lowlevel.checkpoint()
    return call(*args)
