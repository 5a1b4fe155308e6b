"""How fast a device multiplies: what stands in for the times of layers that it has not had to do with."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch

from core.interfaces.planner import CHUNK_ROWS
from core.runtime.device import synchronize

_TRIES = 3
_IN_FEATURES = 4096


class WeightSpeed(NamedTuple):
    """Bytes of weights in a second, with one row and with CHUNK_ROWS rows; 0 if that can't be measured."""

    row: int
    chunk: int


@cache
def weight_speed(device: torch.device) -> WeightSpeed:
    """Measured once per process."""
    return speed_now(device)


def speed_now(device: torch.device) -> WeightSpeed:
    """The best of a few tries, of dense weights, in float32 on a CPU and in float16 elsewhere; takes milliseconds.

    What a decode step waits for is that all weights are read once, and what a prompt waits for are the products.
    """
    on_cpu = device.type == "cpu"
    # For a row so much that it fits no cache, and that what a call costs counts for little.
    rows, products, dtype = (4096, 1, torch.float32) if on_cpu else (16384, 8, torch.float16)
    return WeightSpeed(_speed(device, dtype, rows, 1, products), _speed(device, dtype, 1024, CHUNK_ROWS, 1))


def _speed(device: torch.device, dtype: torch.dtype, out_features: int, rows: int, products: int) -> int:
    try:
        weight = torch.ones(out_features, _IN_FEATURES, dtype=dtype, device=device)
        x = torch.ones(rows, _IN_FEATURES, dtype=dtype, device=device)
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
