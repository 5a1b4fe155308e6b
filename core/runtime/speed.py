"""How fast a device multiplies: what stands in for the times of layers that it has not had to do with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from core.interfaces.dtypes import DType
from core.interfaces.planner import CHUNK_ROWS
from core.interfaces.quantizer import Quantizer
from core.interfaces.stored import StoredForm
from core.runtime.device import synchronize, torch_dtype
from core.runtime.kernel_choice import CHOOSER, Product, normal, timed
from core.runtime.stored_weights import made_up

_TRIES = 3
_IN_FEATURES = 4096
_KEPT = "kept"


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
def product_seconds(
    quantizer: Quantizer, shape: tuple[int, int], dtypes: Sequence[DType], device: torch.device
) -> dict[DType, float]:
    """What one row takes with a weight of `shape` (out_features, in_features), by the dtype that it computes in.

    Found by trying those that agree with the first, and kept with the times of kernels.
    """
    product = Product(quantizer.name, *shape, torch_dtype(dtypes[0]), device)
    key = f"{product} in {', '.join(dtypes)} on {device}, {torch.get_num_threads()} threads"
    kept = CHOOSER.kept.recall(key) if CHOOSER.kept is not None else None
    times = (kept or {}).get(1)
    if times is None:
        times = timed({dtype.value: _product(quantizer, product, dtype) for dtype in dtypes})
        if CHOOSER.kept is not None:
            CHOOSER.kept.keep(key, {1: times})
    return {dtype: times[dtype] for dtype in dtypes if dtype in times}


@torch.inference_mode()
def kept_seconds(
    quantizer: Quantizer, form: StoredForm, shape: tuple[int, int], dtype: DType, device: torch.device
) -> float:
    """What one row takes with a weight of `shape` that is kept in `form`. Found by trying, and kept likewise."""
    product = Product(f"{quantizer.name} {form}", *shape, torch_dtype(dtype), device)
    key = f"{product} on {device}, {torch.get_num_threads()} threads"
    kept = CHOOSER.kept.recall(key) if CHOOSER.kept is not None else None
    times = (kept or {}).get(1)
    if times is None:
        weight = made_up(form, (product.outputs(1), product.in_features))
        linear = quantizer.keep(weight, None, dtype=product.dtype, device=device)
        x = normal(1, product.in_features, product.dtype, device)
        times = timed({_KEPT: lambda: linear(x)})
        if CHOOSER.kept is not None:
            CHOOSER.kept.keep(key, {1: times})
    return times[_KEPT]


def _product(quantizer: Quantizer, product: Product, dtype: DType) -> Callable[[], Tensor]:
    """Computes it in `dtype`, and gives it in the product's own."""
    own, columns, device = torch_dtype(dtype), product.in_features, product.device
    weight = normal(product.outputs(1), columns, torch.float32, device)
    linear = quantizer.pack(weight, None, dtype=own, device=device)
    x = normal(1, columns, own, device)
    return lambda: linear(x).to(product.dtype)


@torch.inference_mode()
def _seconds(weight: torch.Tensor, x: torch.Tensor, products: int) -> float:
    synchronize(weight.device)
    started = time.perf_counter()
    for _ in range(products):
        torch.nn.functional.linear(x, weight)
    synchronize(weight.device)
    return max(time.perf_counter() - started, 1e-9)
