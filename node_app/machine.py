"""What this machine has, and what it is doing apart from serving: battery, load by other programs, free memory."""

from __future__ import annotations

import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from node_app.gpu import Gpu, gpus
from node_app.pause_policy import Measurements

WINDOW = 60
"""A load is the mean of so many measurements, one a second: a program that starts is no reason to pause."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory` and `gpu_memory`, that of the largest GPU, in bytes. `devices`: what a limit may name, and its label."""

    memory: int
    cores: int
    gpu_memory: int
    devices: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls) -> Machine:
        """Asks the GPU's driver, which may take a moment."""
        found = gpus()
        return cls(
            memory=int(psutil.virtual_memory().total),
            cores=os.cpu_count() or 1,
            gpu_memory=max((gpu.memory for gpu in found), default=0),
            devices=tuple(_devices(found)),
        )


def _devices(found: list[Gpu]) -> Iterator[tuple[str, str]]:
    yield "auto", "the best one"
    yield "cpu", "processor"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        yield "mps", "Apple GPU"
    for index, gpu in enumerate(found):
        yield f"cuda:{index}", f"{gpu.name} ({index})"


class Meter:
    """Measures each time it is asked; loads are means of the last WINDOW times (None before)."""

    def __init__(self, gpu_load: Callable[[], float | None]) -> None:
        self._gpu_load = gpu_load
        self._self = psutil.Process()
        self._cpu = Mean(WINDOW)
        self._gpu = Mean(WINDOW)
        self._others()  # psutil's figures are since the call before, so the first are of no use

    def measure(self, held: int) -> Measurements:
        self._cpu.add(self._others())
        self._gpu.add(self._gpu_load())
        return Measurements(
            battery=on_battery(),
            cpu=self._cpu.value,
            gpu=self._gpu.value,
            free_memory=int(psutil.virtual_memory().available),
            held=held,
        )

    def _others(self) -> float:
        """Percent of all cores that other programs use."""
        ours = float(self._self.cpu_percent()) / (os.cpu_count() or 1)
        return max(0.0, float(psutil.cpu_percent()) - ours)


class Mean:
    """Of the last `window` values; unknown before there are so many, and where one of them is."""

    def __init__(self, window: int) -> None:
        self._values: deque[float | None] = deque(maxlen=window)

    def add(self, value: float | None) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        known = [value for value in self._values if value is not None]
        return sum(known) / len(known) if len(known) == self._values.maxlen else None


def on_battery() -> bool:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def measured_load(seconds: float = 0.5) -> float:
    """Percent of all cores in use; takes so long to tell."""
    return float(psutil.cpu_percent(interval=seconds))


def free_cores(load: float) -> int:
    """Cores that nobody uses while other programs take `load` percent of all."""
    return max(1, round((psutil.cpu_count(logical=False) or os.cpu_count() or 1) * (1 - load / 100)))


def polite_threads(load: float) -> int:
    """Compute threads where the user names none: one fewer than the free cores, which moves messages."""
    return max(1, free_cores(load) - 1)
