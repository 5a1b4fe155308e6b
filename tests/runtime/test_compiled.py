"""Compiled layers compute what they do uncompiled, whatever the batch; or it is said why they can't be had."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from platformdirs import user_cache_path
from torch import Tensor

from core import DType, Source
from core.blocks import DecoderLayer, Rotation
from core.errors import ConfigError
from core.interfaces.architecture import Batch
from core.plugins import PluginHost
from core.runtime import compiled
from core.runtime.compiled import RECORDED_ROWS, Opaque, compile_stage, refuse_without_compiler
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
WIDTH = 64
TOLERANCE = {DType.FP32: 1e-4, DType.FP16: 0.06, DType.BF16: 0.4}
"""In standard deviations, as for logits."""
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="this machine has no C++ compiler"
)


class Piece(NamedTuple):
    session: int
    position: int
    rows: int

    @property
    def outputs(self) -> int:
        return self.rows


BATCHES = [
    [Piece(1, 0, 9)],
    [Piece(1, 9, 1)],
    [Piece(1, 10, 1)],
    [Piece(2, 0, 30), Piece(1, 11, 1), Piece(3, 0, 2)],
    [Piece(1, 12, 1), Piece(2, 30, 1), Piece(3, 2, 1)],
    [Piece(1, 5, 4)],
    [Piece(1, 9, 1)],
    [Piece(4, 0, 70)],
]
"""Prefill, decode, batches of both, decode of several, rollback, another prefill."""


@contextmanager
def opened(path: Path) -> Iterator[Model]:
    with Model.open(Source(str(path)), PLUGINS) as model:
        yield model


def load(model: Model, quant: str = "fp16", dtype: DType = DType.FP32, wire: DType = DType.FP32) -> tuple[Stage, Stage]:
    """The model's layers as they are, and ready to be compiled."""
    quantizer, layers = PLUGINS.quantizers.get(quant), range(model.spec.layers)
    plain, _ = model.load_stage(layers, Precision(quantizer, dtype, wire), CPU)
    opaque, _ = model.load_stage(layers, Precision(Opaque(quantizer), dtype, wire), CPU)
    assert opaque.nbytes == plain.nbytes
    return plain, opaque


def run(stage: Stage) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = [torch.randn(sum(piece.rows for piece in batch), WIDTH, generator=generator) for batch in BATCHES]
    return [stage.run(rows, batch, outputs_only=False) for rows, batch in zip(hidden, BATCHES, strict=True)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), layers=3)


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@needs_compiler
@pytest.mark.parametrize(
    ("model_type", "quant", "dtype", "wire"),
    [
        ("llama", "fp16", DType.FP32, DType.FP32),
        ("qwen3", "fp16", DType.FP16, DType.FP32),
        ("gemma2", "int8", DType.BF16, DType.BF16),
        ("gemma3_text", "int4", DType.BF16, DType.FP32),
    ],
)
def test_compiled_layers_compute_the_same_and_no_batch_compiles_anything(
    tmp_path: Path, model_type: str, quant: str, dtype: DType, wire: DType
) -> None:
    with opened(tiny_checkpoint(tmp_path, layers=3, model_type=model_type)) as model:
        plain, stage = load(model, quant, dtype, wire)
    compile_stage(stage, WIDTH, torch_dtype(dtype))
    with torch.compiler.set_stance("fail_on_recompile"):
        found = run(stage)
    for one, other in zip(found, run(plain), strict=True):
        assert one.dtype is other.dtype
        assert (one - other).abs().max() < TOLERANCE[dtype] * other.std()


class Recorder:
    """Stands in for CUDA's: what is recorded runs anew at each replay, into the memory of its first results.

    All other results are spoilt then, as if their memory had served for something else.
    """

    def __init__(self) -> None:
        self.recorded: list[list[Tensor]] = []
        self.replays = 0

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = call()
        ours = list(tensors(results))
        self.recorded.append(ours)

        def replay() -> None:
            self.replays += 1
            for tensor, computed in zip(ours, tensors(call()), strict=True):
                tensor.copy_(computed)

        for tensor in ours:
            tensor.fill_(torch.nan)
        return replay, results

    @torch.inference_mode()
    def spoil(self) -> None:
        for tensor in (tensor for results in self.recorded for tensor in results):
            tensor.fill_(torch.nan)


def tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    else:
        for result in results:
            yield from tensors(result)


@pytest.mark.usefixtures("not_compiled")
def test_few_rows_are_replayed_where_the_device_can_record(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(compiled, "recorder", lambda device: recorder)
    with opened(llama) as model:
        plain, stage = load(model)
    compile_stage(stage, WIDTH, torch.float32)
    pieces = len(stage.layers) + 1
    assert len(recorder.recorded) == RECORDED_ROWS * pieces
    recorder.replays = 0
    recorder.spoil()
    found = run(stage)
    recorder.spoil()
    for one, other in zip(found, run(plain), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    few = [batch for batch in BATCHES if sum(piece.rows for piece in batch) <= RECORDED_ROWS]
    assert recorder.replays == len(few) * pieces > 0


@pytest.mark.usefixtures("not_compiled")
def test_a_recording_that_replays_something_else_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(Recorder):
        def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            return (lambda: None), call()

    monkeypatch.setattr(compiled, "recorder", lambda device: Frozen())
    with opened(llama) as model:
        _, stage = load(model)
    with pytest.raises(ConfigError, match="compute something else"):
        compile_stage(stage, WIDTH, torch.float32)


def test_a_compiler_that_fails_is_said_in_one_sentence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(function: object, **_: object) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise RuntimeError("no working C++ compiler found\n\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with opened(llama) as model:
        _, stage = load(model)
    before = stage.stack
    said = "--compile can't be had: no working C\\+\\+ compiler found .*install a C\\+\\+ compiler"
    with pytest.raises(ConfigError, match=said):
        compile_stage(stage, WIDTH, torch.float32)
    with pytest.raises(ConfigError, match=said):
        refuse_without_compiler(CPU)
    assert stage.stack is before


def test_code_that_computes_something_else_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def miscompile(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return lambda layer, *inputs: [1.001 * each for each in tensors(function(layer, *inputs))]

    monkeypatch.setattr(torch, "compile", miscompile)
    with opened(llama) as model:
        _, stage = load(model)
    with pytest.raises(ConfigError, match="compute something else"):
        compile_stage(stage, WIDTH, torch.float32)


@pytest.mark.usefixtures("not_compiled")
def test_layers_that_compute_more_than_their_pieces_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(self: DecoderLayer, hidden: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        return 1.01 * self.after(hidden, self.attend(batch, *self.before(hidden, rotation)))

    monkeypatch.setattr(DecoderLayer, "__call__", more)
    with opened(llama) as model:
        _, stage = load(model)
    with pytest.raises(ConfigError, match="compute something else"):
        compile_stage(stage, WIDTH, torch.float32)


def test_a_family_whose_layers_are_not_in_pieces_is_refused() -> None:
    stage = Stage(lambda hidden, batch: hidden, range(1), CPU, torch.float32, nbytes=0)
    with pytest.raises(ConfigError, match=r"family's layers are not in pieces .*leave it out"):
        compile_stage(stage, WIDTH, torch.float32)


@needs_compiler
def test_a_compiled_stage_that_is_dropped_lets_go_of_its_weights(llama: Path) -> None:
    with opened(llama) as model:
        _, stage = load(model)
    weight: Any = weakref.ref(stage.stack.layers[0].mlp.down.linear.weight)  # type: ignore[attr-defined]
    compile_stage(stage, WIDTH, torch.float32)
    run(stage)
    del stage
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    "compile_anything", [lambda _: refuse_without_compiler(CPU), lambda s: compile_stage(s, WIDTH, torch.float32)]
)
def test_compiled_code_is_kept_where_no_other_user_writes(
    llama: Path, monkeypatch: pytest.MonkeyPatch, compile_anything: Callable[[Stage], None]
) -> None:
    kept: list[str] = []

    def noted(function: Any, **_: Any) -> Any:
        kept.append(os.environ[compiled.CODE_CACHE])
        return function

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setenv(compiled.CODE_CACHE, "chosen")
    monkeypatch.delenv(compiled.CODE_CACHE)
    with opened(llama) as model:
        compile_anything(load(model)[1])
    assert kept
    assert all(Path(folder).is_relative_to(user_cache_path("core")) for folder in kept)
