"""What a device has free, on devices that need not be there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.interfaces.dtypes import DType
from core.runtime.device import DeviceInfo, detect, free_memory, give_back_memory, recorder, refuse_dtype

FREE, TOTAL = 3 * 2**30, 8 * 2**30
RESERVED, ALLOCATED = 2 * 2**30, 2**30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="fake", total_memory=TOTAL))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: RESERVED)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: ALLOCATED)
    return torch.device("cuda:0")


def test_what_the_allocator_keeps_unused_is_free(cuda: torch.device) -> None:
    assert free_memory(cuda) == FREE + RESERVED - ALLOCATED


def test_devices_are_found_without_memory_being_taken_on_them(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "mem_get_info")  # it makes a context of hundreds of megabytes
    assert detect()[0] == DeviceInfo("cuda:0", "cuda", "fake", TOTAL)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_what_the_allocator_keeps_goes_back_to_the_system(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    give_back_memory(torch.device(kind, 0))
    assert emptied == [kind]


def test_a_dtype_that_a_device_cant_even_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_mps_says_before_macos_14(*_: object, **__: object) -> None:
        raise TypeError("BFloat16 is not supported on MPS")

    monkeypatch.setattr(torch, "ones", as_mps_says_before_macos_14)
    assert refuse_dtype(torch.device("mps"), DType.BF16) == (
        "mps does not compute in bf16: BFloat16 is not supported on MPS"
    )


def test_a_gpu_that_holds_nothing_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_in_a_virtual_machine(*_: object, **__: object) -> None:
        raise RuntimeError("MPS backend out of memory")

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", as_in_a_virtual_machine)
    assert "mps" not in [device.type for device in detect()]


def test_what_is_recorded_runs_once_before_on_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    capture = inspect.signature(torch.cuda.graph)

    @contextmanager
    def within(name: str) -> Iterator[None]:
        said.append(name)
        yield
        said.append(f"end of {name}")

    def captured(*given: Any, **options: Any) -> Any:
        bound = capture.bind(*given, **options).arguments
        assert bound["pool"] == "pool"
        assert bound["capture_error_mode"] == "thread_local"
        return within(f"graph on {bound['stream']}")

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    record = recorder(torch.device("cuda:1"))
    assert record is not None
    replay, result = record(lambda: said.append("call") or 7)
    on = "a stream of cuda:1"
    assert said == ["synchronize", on, "call", f"end of {on}", f"graph on {on}", "call", f"end of graph on {on}"]
    replay()
    assert (said[-1], result) == ("replay", 7)


def test_a_cpu_records_nothing() -> None:
    assert recorder(torch.device("cpu")) is None
