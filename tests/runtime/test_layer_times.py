"""Layers are timed without touching what is served, and what was found is there for the next process."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from core.errors import StageError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime import layer_times
from core.runtime.compute import open_compute_thread
from core.runtime.layer_costs import KIND_BYTES, LayerCost, layer_costs
from core.runtime.layer_times import KeptTimes, Times, by_kind, time_stage
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.checkpoints import tiny_checkpoint
from core.testing.families import tiny_family

SECONDS = 300
CPU = torch.device("cpu")
WIDTH = 64
PLUGINS = PluginHost.installed()
DENSE, MIXED = LayerCost(b"d" * KIND_BYTES, 100), LayerCost(b"m" * KIND_BYTES, 300)


def precision(quant: str = "fp16") -> Precision:
    return Precision(PLUGINS.quantizers.get(quant), DType.FP32, DType.FP32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=3)


@pytest.fixture
def stage(model: Path) -> Stage:
    with Model.open(Source(str(model)), PLUGINS) as opened:
        assert opened.spec.hidden_size == WIDTH
        return opened.load_stage(range(3), precision(), CPU)[0]


async def test_a_stage_is_timed_without_a_trace_in_its_caches(stage: Stage) -> None:
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage") as compute:
            found = await time_stage(compute, stage, WIDTH)
    assert found is not None
    assert found.row > 0
    assert found.chunk > 0
    assert (len(stage.caches), stage.caches.nbytes) == (0, 0)


async def test_what_a_busy_program_takes_all_the_time_counts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other row waits for it; and a hiccup in one try decides nothing."""
    seconds = itertools.chain([5.0], itertools.cycle([0.001, 0.009]))
    monkeypatch.setattr(layer_times.Trial, "seconds", lambda _, rows: next(seconds) if rows == 1 else 0.01)
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage") as compute:
            found = await time_stage(compute, stage, WIDTH)
    assert found is not None
    assert found.row == pytest.approx(0.005, rel=0.2)


async def test_it_gives_way_to_whoever_needs_the_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, stack = 0, stage.stack

    def noted(*args: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 3:
            compute.start(wait.wait)
        return stack(*args)

    monkeypatch.setattr(stage, "stack", noted)
    wait = threading.Event()
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage") as compute:
            assert await time_stage(compute, stage, WIDTH) is None
            assert passes == 3
            wait.set()


async def test_a_stage_that_cant_compute_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stage, "stack", fail)
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage") as compute:
            with pytest.raises(StageError, match="out of memory"):
                await time_stage(compute, stage, WIDTH)


def test_layers_of_two_kinds_share_by_what_a_row_reads() -> None:
    found = by_kind(Times(0.6, 6.0), [DENSE, MIXED, DENSE, DENSE])
    assert found[DENSE.kind] == Times(pytest.approx(0.1), pytest.approx(1.0))
    assert found[MIXED.kind] == Times(pytest.approx(0.3), pytest.approx(3.0))
    assert by_kind(Times(0.6, 6.0), []) == {}


def test_what_was_found_is_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "layers.json"
    KeptTimes(CPU, path).keep({DENSE.kind: Times(0.1, 1.0)})
    KeptTimes(CPU, path).keep({MIXED.kind: Times(0.2, 0.0)})
    assert KeptTimes(CPU, path).by_kind == {DENSE.kind: Times(0.1, 1.0), MIXED.kind: Times(0.2, 0.0)}


@pytest.mark.parametrize("content", [b"", b"{", b'{"x": 1}', b"\x00"])
def test_from_a_damaged_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "layers.json").write_bytes(content)
    assert KeptTimes(CPU, tmp_path / "layers.json").by_kind == {}


def test_another_number_of_threads_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeptTimes(CPU, tmp_path / "layers.json").keep({DENSE.kind: Times(0.1, 1.0)})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert KeptTimes(CPU, tmp_path / "layers.json").by_kind == {}


def test_what_is_not_known_of_a_kind_leaves_what_was(tmp_path: Path) -> None:
    times = KeptTimes(CPU, tmp_path / "layers.json")
    times.note({DENSE.kind: Times(0.1, 1.0)})
    times.note({DENSE.kind: Times(0.2, 0.0)})
    assert times.by_kind == {DENSE.kind: Times(0.2, 1.0)}


def test_layers_alike_are_of_one_kind_whichever_model_they_are_of(model: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path, layers=2, seed=7)
    found = [costs_of(path, quant) for path in (model, other) for quant in ("fp16", "int8")]
    kinds = [{cost.kind for cost in costs} for costs in found]
    assert [len(each) for each in kinds] == [1, 1, 1, 1]
    assert kinds[:2] == kinds[2:]
    assert kinds[0] != kinds[1]
    with Model.open(Source(str(model)), PLUGINS) as opened:
        assert found[0][0].read_bytes == opened.layer_bytes(0, precision())


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_of_experts_a_row_reads_those_that_it_chooses(tmp_path: Path, family: str) -> None:
    """Two of four."""
    whole, half = tiny_family(tmp_path / "a", family, num_experts_per_tok=4), tiny_family(tmp_path / "b", family)
    all_read, some_read = costs_of(whole)[-1].read_bytes, costs_of(half)[-1].read_bytes
    with Model.open(Source(str(half)), PLUGINS) as opened:
        last = opened.spec.layers - 1
        assert all_read == opened.layer_bytes(last, precision())
        tensors = [
            (name, tensor.shape) for name, tensor in opened.checkpoint.tensors.items() if f"layers.{last}." in name
        ]
        shapes = [shape for name, shape in tensors if ".experts." in name or len(shape) == 3]
    assert shapes
    assert all_read - some_read == sum(math.prod(shape) for shape in shapes) * 4 / 2


def costs_of(path: Path, quant: str = "fp16") -> tuple[LayerCost, ...]:
    with Model.open(Source(str(path)), PLUGINS) as opened:
        return layer_costs(opened, range(opened.spec.layers), precision(quant), quant)
