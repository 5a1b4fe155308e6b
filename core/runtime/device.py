"""Every difference between devices, in one file: what is there, how much memory it has, how to name a dtype."""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import psutil
import torch

from core.errors import ConfigError
from core.interfaces.dtypes import DType

T = TypeVar("T")
_MANY_ROWS = 5
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""What torch's CPU allocator looks for when it is first asked."""
_RECORDING = threading.Lock()
"""Held while a device's work is recorded: memory can't be given back meanwhile."""
_TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that torch can compute on, with its memory in bytes."""

    id: str
    type: str
    name: str
    total_memory: int


def torch_dtype(dtype: DType) -> torch.dtype:
    return _TORCH[dtype]


def detect() -> list[DeviceInfo]:
    """The devices of this machine, best first: CUDA, then MPS, then the CPU."""
    return [*_cuda(), *_mps(), _cpu()]


def pick(name: str) -> torch.device:
    """The device that `--device` names: auto, cuda, cuda:N, mps or cpu. Raises ConfigError for one that isn't there."""
    found = detect()
    if name == "auto":
        return torch.device(found[0].id)
    for device in found:
        if name in (device.id, device.type):
            return torch.device(device.id)
    raise ConfigError(f"this machine has no device {name!r}", "", f"it has: {', '.join(device.id for device in found)}")


def device_name(device: torch.device) -> str:
    """What `device` is called by its maker; a CPU, whose name says less than what it can, by its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_memory(device: torch.device) -> int:
    """Bytes that a stage can still take on `device`.

    On CUDA, what torch's allocator keeps for itself and does not use counts as free.

    MPS shares the machine's memory and reports no free figure: what the system has free counts, within the size
    that Metal recommends as a working set.
    """
    if device.type == "cuda":
        return _cuda_free(device)
    if device.type == "mps":
        room = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(int(room), _system_free()))
    return _system_free()


def synchronize(device: torch.device) -> None:
    """Waits until all that was asked of `device` is computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def give_back_memory(device: torch.device) -> None:
    """Returns to the system what nothing uses any more: what lies in cycles, and what torch's allocator keeps."""
    gc.collect()
    if device.type == "cuda":
        with _RECORDING:
            torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


class Recorder:
    """Records what calls compute on a CUDA device (CUDA graphs). Not on others: see `recorder`.

    All recordings of one recorder share the memory of what isn't held: they are replayed as they were recorded, one
    after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """`call` asks for nothing but kernels. What replays them, from the same memory into the same; their results.

        It is called once before, since what is set up at a first call can't be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with _RECORDING, torch.cuda.device(self._device):
            synchronize(self._device)
            with torch.cuda.stream(self._stream):
                call()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                results = call()
        return graph.replay, results


def recorder(device: torch.device) -> Recorder | None:
    """None where nothing can be recorded on `device`."""
    return Recorder(device) if device.type == "cuda" else None


def refuse_dtype(device: torch.device, dtype: DType) -> str | None:
    """Why `device` can't compute in `dtype`, found by trying a small product; None where it can."""
    try:
        probe = torch.ones(2, 2, dtype=torch_dtype(dtype), device=device)
        result = (probe @ probe).float().cpu()
    except (RuntimeError, TypeError) as error:
        return f"{device} does not compute in {dtype}: {error}"
    if not torch.equal(result, torch.full((2, 2), 2.0, dtype=torch.float32)):
        return f"{device} computes wrong results in {dtype}"
    return None


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What attention is best computed in where `dtype` is asked for, and a product of what is dequantised anyway."""
    return torch.float32 if dtype is torch.float16 and _converts_faster(device.type, dtype) else dtype


def matmul_dtype(device: torch.device, dtype: torch.dtype, rows: int) -> torch.dtype:
    """What the product of `rows` rows with a weight in `dtype` is to compute in.

    A few rows are bound by reading the weight, which a conversion would read and write once more.
    """
    return torch.float32 if rows >= _MANY_ROWS and _converts_faster(device.type, dtype) else dtype


@cache
def _converts_faster(device_type: str, dtype: torch.dtype) -> bool:
    """Whether products in `dtype` are slower than converting to fp32 and back: so on a CPU without its arithmetic.

    Found by trying: with AVX-512 but no fp16 instructions, 4 times slower from 16 rows on, and so is attention.
    """
    if device_type != "cpu" or dtype is torch.float32:
        return False
    x, weight = torch.ones(2 * _MANY_ROWS, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    native = _best_of(lambda: x @ weight)
    converted = _best_of(lambda: (x.float() @ weight.float()).to(dtype))
    return converted < native


def _best_of(call: Callable[[], object], tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def default_threads() -> int:
    """Compute threads where the user names none: the physical cores less one, which moves the messages."""
    return max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 2) - 1)


def set_up_torch(threads: int | None) -> None:
    """For this process, before its first tensor: how many compute threads (None: the default), and huge pages.

    With those Linux backs blocks of 2 MB and more by pages of that size, not of 4 KB. Weights load up to three times as
    fast then, for most of that time went into page faults.
    """
    os.environ.setdefault(_HUGE_PAGES, "1")
    torch.set_num_threads(threads or default_threads())


def _system_free() -> int:
    return int(psutil.virtual_memory().available)


def _cuda() -> list[DeviceInfo]:
    """What is free on them isn't asked: that alone makes CUDA take some 400 MB on each."""
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [DeviceInfo(f"cuda:{index}", "cuda", each.name, each.total_memory) for index, each in enumerate(devices)]


def _cuda_free(device: torch.device) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _mps() -> list[DeviceInfo]:
    """A virtual machine may show one that holds nothing."""
    if not torch.backends.mps.is_available() or refuse_dtype(torch.device("mps"), DType.FP32):
        return []
    return [DeviceInfo("mps", "mps", "Apple Silicon", int(torch.mps.recommended_max_memory()))]


def _cpu() -> DeviceInfo:
    name = platform.processor() or platform.machine()
    return DeviceInfo("cpu", "cpu", name, int(psutil.virtual_memory().total))
