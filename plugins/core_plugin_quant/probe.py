"""Whether a kernel of torch's is there, right and worth it, found by trying it against the portable path."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""In standard deviations of the product: what rounding to the dtype does, with room."""

_WORTH = 2.0
_TRIES = 5


def is_better(kernel: Callable[[], Tensor], portable: Callable[[], Tensor]) -> bool:
    """Whether `kernel` gives what `portable` gives, within the dtype's tolerance, at least twice as fast."""
    try:
        given = kernel()
    # A kernel that isn't built for this device or size says so in any of these ways.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    expected = portable()
    if given.shape != expected.shape or given.dtype is not expected.dtype:
        return False
    bound = TOLERANCE[expected.dtype] * float(expected.float().std())
    if not bool((given.float() - expected.float()).abs().max() <= bound):
        return False
    # A CPU's own time says how long a call takes, whatever else the machine does meanwhile.
    clock = time.thread_time if expected.device.type == "cpu" else time.perf_counter
    times = [(_seconds(kernel, clock), _seconds(portable, clock)) for _ in range(_TRIES)]
    return min(first for first, _ in times) * _WORTH < min(second for _, second in times)


def _seconds(call: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    started = clock()
    call()[-1, -1].item()
    return clock() - started


def sample(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same normally distributed values at each call."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
    return values.to(device, dtype)
