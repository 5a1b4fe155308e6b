"""How fast a device multiplies: what a decode step waits for is that all weights are read once."""

from __future__ import annotations

import time
from functools import cache

import torch

from core.runtime.device import synchronize

_TRIES = 3


@cache
def weight_speed(device: torch.device) -> int:
    """Bytes of weights per second that `device` multiplies with one row, the best of a few tries; takes milliseconds.

    Measured once per process, in float32 on a CPU and in float16 elsewhere. 0 where it can't be measured.
    """
    on_cpu = device.type == "cpu"
    # So much that it fits no cache, and that what a call costs counts for little.
    rows, products, dtype = (4096, 1, torch.float32) if on_cpu else (16384, 8, torch.float16)
    try:
        weight, x = torch.ones(rows, 4096, dtype=dtype, device=device), torch.ones(1, 4096, dtype=dtype, device=device)
        best = min(_seconds(weight, x, products) for _ in range(_TRIES))
    # So torch says that a device lacks memory, or a kernel.
    except RuntimeError:
        return 0
    return int(products * weight.nbytes / best)


@torch.inference_mode()
def _seconds(weight: torch.Tensor, x: torch.Tensor, products: int) -> float:
    synchronize(weight.device)
    started = time.perf_counter()
    for _ in range(products):
        torch.nn.functional.linear(x, weight)
    synchronize(weight.device)
    return max(time.perf_counter() - started, 1e-9)
