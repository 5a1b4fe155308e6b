"""Which kernel multiplies with a weight: of those that can, the one that is fastest on this machine, found by trying.

That depends on the weight's shape and dtype, and on the number of rows it is multiplied with. What was found is kept
for the process, so that a product is computed in the same way each time, and in the user's cache for the next process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from core.runtime.kernel_times import KernelTimes, Times
from core.runtime.memory import large_blocks_kept

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""The numbers of rows that kernels are timed with. What was fastest with one of them multiplies as many rows, and fewer
down to the next one; more than the last as well."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""In standard deviations of the product: what rounding to the dtype does, with room."""

_LAST = len(ROWS) - 1
_TRIES, _MIN_TRIES = 5, 2
_SECONDS = 0.02
"""Once trying has taken so long, it ends."""
_CLOSE = 2.0
"""What takes so many times as long as the fastest is not tried again."""
_SET_UP = 5e-3
"""What a first call may take to get ready: what took no more is tried again in any case."""
_FAR = 4.0
_PRODUCTS, _VALUES, _MIN_OUTPUTS, _ALIGNMENT = 1 << 26, 1 << 21, 256, 64
"""Of a large weight only the first output features are tried: about so many products, of so many values."""
_WORTH_KEEPING = 1 << 18
"""A weight of fewer values is tried anew by each process."""

L = TypeVar("L")
Kernel = Callable[[L, Tensor], Tensor]
"""Gives what a linear layer of the kind L makes of x [rows, in_features]."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Product:
    """What a kernel is chosen for. `operation` says how the weight is held."""

    operation: str
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} {self.out_features}x{self.in_features} {dtype}"

    def outputs(self, rows: int) -> int:
        """How many output features to try with so many rows."""
        within = min(_PRODUCTS // (rows * self.in_features), _VALUES // self.in_features)
        return min(self.out_features, max(_MIN_OUTPUTS, within // _ALIGNMENT * _ALIGNMENT))


class Kernels(Generic[L]):
    """The kernels for one product, by the number of rows; and `times`, in seconds, that say why."""

    def __init__(self, kernels: Mapping[str, Kernel[L]], times: Times | None = None) -> None:
        """The first of `kernels` is taken where there are no times."""
        first = next(iter(kernels))
        found = times or {}
        self.times = {
            rows: {name: spent for name, spent in found.get(rows, {}).items() if name in kernels} for rows in ROWS
        }
        self.names = [min(each, key=each.__getitem__, default=first) for each in self.times.values()]
        self._by_rows = [kernels[name] for name in self.names]

    def __call__(self, linear: L, x: Tensor) -> Tensor:
        return self._by_rows[min(max(len(x) - 1, 0).bit_length(), _LAST)](linear, x)

    def seconds(self, rows: int) -> float:
        """What the kernel for so many rows, one of `ROWS`, takes."""
        return min(self.times[rows].values(), default=math.inf)

    def ranges(self) -> Iterator[tuple[str, range]]:
        """Each kernel with the numbers of rows that it multiplies; the last also multiplies more."""
        start = 1
        for name, group in groupby(zip(ROWS, self.names, strict=True), key=lambda pair: pair[1]):
            stop = [rows for rows, _ in group][-1] + 1
            yield name, range(start, stop)
            start = stop

    def summary(self) -> str:
        """Which kernel multiplies how many rows, in words."""
        *others, (last, rows) = self.ranges()
        said = [f"{name} up to {each[-1]} row{'s' * (each[-1] > 1)}" for name, each in others]
        return ", ".join([*said, f"{last} from {rows[0]} rows on" if said else last])


@dataclass(frozen=True, slots=True)
class Choice:
    product: Product
    kernels: Kernels[object]


class Chooser:
    """Finds out which kernels are fastest, once for each product. Any thread may ask."""

    def __init__(self, kept: KernelTimes | None = None, clock: Clock | None = None) -> None:
        self.kept = kept
        self._clock = clock
        self._times: dict[str, Times] = {}
        self._choices: dict[str, Choice] = {}
        self._lock = Lock()

    def choose(self, product: Product, kernels: Mapping[str, Kernel[L]], sample: Callable[[int], L]) -> Kernels[L]:
        """Of `kernels` the first one is right; others are taken where they give the same within the tolerance.

        `sample(n)` is a linear layer like those of `product`, with only n output features.
        """
        with self._lock:
            key = f"{product} on {product.device}, {torch.get_num_threads()} threads: {', '.join(kernels)}"
            if key not in self._times:
                self._times[key] = self._find(key, product, kernels, sample)
            return Kernels(kernels, self._times[key])

    def note(self, product: Product, kernels: Kernels[L]) -> Kernels[L]:
        """Keeps `kernels`, which were chosen for `product`, to be told."""
        self._choices[str(product)] = Choice(product, kernels)  # type: ignore[arg-type]
        return kernels

    def choices(self) -> list[Choice]:
        """What was chosen in this process."""
        return list(self._choices.values())

    def _find(self, key: str, product: Product, kernels: Mapping[str, Kernel[L]], sample: Callable[[int], L]) -> Times:
        kept = self.kept if product.out_features * product.in_features >= _WORTH_KEEPING else None
        times = kept.recall(key) if kept is not None else None
        if times is not None and set(times) == set(ROWS) and all(times.values()):
            return times
        times = self._try(product, kernels, sample)
        if kept is not None:
            kept.keep(key, times)
        return times

    @torch.inference_mode()
    def _try(self, product: Product, kernels: Mapping[str, Kernel[L]], sample: Callable[[int], L]) -> Times:
        times: Times = {}
        outputs, hopeful = product.outputs(ROWS[0]), dict(kernels)
        linear = sample(outputs)
        with large_blocks_kept():
            for rows in ROWS:
                x = normal(rows, product.in_features, product.dtype, product.device)
                if outputs != product.outputs(rows):
                    outputs = product.outputs(rows)
                    linear = sample(outputs)
                times[rows] = timed({name: partial(kernel, linear, x) for name, kernel in hopeful.items()}, self._clock)
                for name in _hopeless(times):
                    del hopeful[name]
        return times


def _hopeless(times: Times) -> Iterator[str]:
    """Kernels other than the first that are far slower than the fastest, and came no nearer to it with more rows."""
    ratios = [{name: spent / min(each.values()) for name, spent in each.items()} for each in times.values()][-2:]
    for name in list(ratios[-1])[1:]:
        if all(ratio.get(name, 0.0) > _FAR for ratio in ratios) and ratios[-1][name] > ratios[0][name]:
            yield name


CHOOSER = Chooser(KernelTimes())
"""What this process chooses by."""


def choose_kernels(product: Product, kernels: Mapping[str, Kernel[L]], sample: Callable[[int], L]) -> Kernels[L]:
    """As `Chooser.choose`, for this process."""
    return CHOOSER.note(product, CHOOSER.choose(product, kernels, sample))


def timed(calls: Mapping[str, Callable[[], Tensor]], clock: Clock | None = None) -> dict[str, float]:
    """Seconds of each call that gives what the first one does, within the dtype's tolerance."""
    first, *others = calls
    expected = calls[first]()
    # A CPU's own time says how long a call takes, whatever else the machine does meanwhile.
    clock = clock or (time.thread_time if expected.device.type == "cpu" else time.perf_counter)
    started = clock()
    seconds = {first: _seconds(calls[first], clock)}
    for name in others:
        began = clock()
        if _agrees(calls[name], expected):
            seconds[name] = clock() - began
    for number in range(_TRIES):
        if number >= _MIN_TRIES and clock() - started > _SECONDS:
            break
        close = max(_CLOSE * min(seconds.values()), 0 if number else _SET_UP)
        for name in [name for name, spent in seconds.items() if spent <= close]:
            seconds[name] = min(seconds[name], _seconds(calls[name], clock))
    return seconds


def _agrees(call: Callable[[], Tensor], expected: Tensor) -> bool:
    # A kernel that isn't built for this device, dtype or size says so in any of these ways.
    with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
        given = call()
        if given.shape == expected.shape and given.dtype is expected.dtype:
            bound = TOLERANCE[expected.dtype] * expected.float().std(correction=0)
            return bool((given.float() - expected.float()).abs().max() <= bound)
    return False


def _seconds(call: Callable[[], Tensor], clock: Clock) -> float:
    started = clock()
    call()[-1, -1].item()
    return clock() - started


def normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same normally distributed values at each call."""
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32).to(device, dtype)
