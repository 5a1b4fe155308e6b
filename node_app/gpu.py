"""Nvidia GPUs, and what other programs use of them, where there are any and the `nvidia-ml-py` package can ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory` in bytes."""

    name: str
    memory: int


def gpus() -> list[Gpu]:
    """Those that this machine has, in their driver's order."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def gpu_meter() -> Iterator[Callable[[], float | None]]:
    """A function that tells the percent of the busiest GPU's time that others took since the last call, or None."""
    try:
        import pynvml
    except ImportError:
        yield _unknown
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield _unknown
        return
    try:
        yield _Gpus().others
    finally:
        pynvml.nvmlShutdown()


def _unknown() -> None:
    return None


class _Gpus:
    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._seen: dict[int, int] = {}
        """The time of the last sample, by GPU."""

    def others(self) -> float | None:
        try:
            count = self._nvml.nvmlDeviceGetCount()
            return max((self._others_on(index) for index in range(count)), default=None)
        except self._nvml.NVMLError:
            return None

    def _others_on(self, index: int) -> float:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._seen.get(index, 0))
        except self._nvml.NVMLError_NotFound:  # nobody has used it since
            return 0.0
        latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: int(sample.timeStamp))}
        self._seen[index] = max((int(sample.timeStamp) for sample in latest.values()), default=0)
        return float(sum(sample.smUtil for pid, sample in latest.items() if pid != os.getpid()))
