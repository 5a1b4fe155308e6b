"""Layers compiled by torch.compile, each in the two pieces around attention: what `--compile` asks for.

The pieces call linear layers through an operator that the compiler doesn't look into. So weights stay as their kernels
want them, those of any quantizer can be compiled, and what lies between them is fused.

On CUDA a few rows are not computed kernel by kernel: what lies between one attention and the next is recorded, once
for each number of rows, and replayed (CUDA graphs).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from platformdirs import user_cache_path
from torch import Tensor

from core.errors import ConfigError
from core.interfaces.architecture import Batch, PiecewiseLayer, PiecewiseStack
from core.interfaces.checkpoint import Progress
from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Linear, Quantizer
from core.interfaces.stored import StoredForm, StoredWeight
from core.runtime.device import Recorder, recorder
from core.runtime.kv_cache import CacheStore, SegmentBatch
from core.runtime.stage import Stage

MANY_ROWS = 32
"""What code for any number of rows is compiled with: it is laid out for about so many."""
RECORDED_ROWS = 8
"""Batches of up to so many rows are recorded where the device can."""
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""By compute dtype: how far results may be from those uncompiled, relative to their length.

At least six times what a CPU's rounding was seen to do: 3e-7, 9e-4, 9e-3.
"""
CODE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
QKV = tuple[Tensor, Tensor, Tensor]
T = TypeVar("T")
_LINEARS: WeakValueDictionary[int, OpaqueLinear] = WeakValueDictionary()
_STACKS: WeakSet[CompiledStack] = WeakSet()
"""Those that still compute."""


@torch.library.custom_op("core::linear", mutates_args=())
def _linear(x: Tensor, key: Tensor, out_features: int) -> Tensor:
    return _LINEARS[int(key)].linear(x)


@_linear.register_fake
def _(x: Tensor, key: Tensor, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


class OpaqueLinear:
    """A linear layer as one operator, which knows it by `key`: a tensor, so that layers can share compiled code."""

    def __init__(self, linear: Linear, out_features: int) -> None:
        self.linear = linear
        self.nbytes = linear.nbytes
        self.out_features = out_features
        self.key = torch.tensor(id(self))
        _LINEARS[id(self)] = self

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _linear(x, self.key, self.out_features)
        return y


class Opaque(Quantizer):
    """Packs layers' weights as `quantizer` does, into linear layers that can be compiled around."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return self._quantizer.packed_bytes(shape, dtype)

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> OpaqueLinear:
        return OpaqueLinear(self._quantizer.pack(weight, bias, dtype=dtype, device=device), len(weight))

    def keeps(self, form: StoredForm) -> bool:
        return self._quantizer.keeps(form)

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        return self._quantizer.kept_bytes(shape, form, dtype)

    def keep(
        self, weight: StoredWeight, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device
    ) -> OpaqueLinear:
        return OpaqueLinear(self._quantizer.keep(weight, bias, dtype=dtype, device=device), weight.shape[0])


@torch.inference_mode()
def compile_stage(stage: Stage, hidden_size: int, dtype: torch.dtype, progress: Progress | None = None) -> None:
    """From now on `stage` computes with compiled layers, held here against what they compute without.

    `stage` was loaded with an Opaque quantizer, to compute in `dtype`. Raises ConfigError where its layers can't be
    compiled, or compute something else then.
    """
    if not isinstance(stage.stack, PiecewiseStack):
        raise refusal("this family's layers are not in pieces that could be compiled")
    keep_code_apart()
    stack, record = CompiledStack(stage.stack, BOUNDS[dtype]), recorder(stage.device)
    trial = partial(_trial, stage, hidden_size)
    steps: list[Callable[[], None]] = [partial(stack.compile, trial(rows)) for rows in (MANY_ROWS, 1)]
    if record is not None:
        steps += [partial(stack.record, record, trial(rows), trial(rows)) for rows in range(1, RECORDED_ROWS + 1)]
    for done, step in enumerate(steps, 1):
        attempt(step)
        if progress is not None:
            progress(stage.nbytes * done // len(steps), stage.nbytes)
    stage.stack = stack


def attempt(step: Callable[[], T]) -> T:
    """Raises ConfigError where a compiler, or anything that it calls, fails in whatever way."""
    try:
        return step()
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "install a C++ compiler (g++, clang, or MSVC), and Triton for CUDA, or leave it out"
        raise refusal(reason, hint) from error


def keep_code_apart() -> None:
    """Before torch compiles anything: its own choice is a folder of a known name in /tmp, from which it runs what it
    finds, whoever put it there."""
    os.environ.setdefault(CODE_CACHE, str(user_cache_path("core") / "compiled"))


def refusal(reason: str, hint: str = "leave it out") -> ConfigError:
    return ConfigError("--compile can't be had", reason, hint)


def refuse_without_compiler(device: torch.device) -> None:
    """Raises ConfigError where not even a sum can be compiled for `device`."""
    keep_code_apart()
    attempt(partial(torch.compile(_doubled), torch.ones(64, device=device)))


def _doubled(x: Tensor) -> Tensor:
    return x + x


class Trial(NamedTuple):
    """Rows that are computed to compile, or to compare."""

    hidden: Tensor
    batch: Batch


class _Rows(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int


def _trial(stage: Stage, hidden_size: int, rows: int) -> Trial:
    """So small that what a layer adds to it is most of the result."""
    hidden = torch.randn(rows, hidden_size, device=stage.device).to(stage.residual_dtype) / 100
    batch = SegmentBatch([_Rows(1, 0, rows, rows)], CacheStore(stage.layers), stage.device)
    return Trial(hidden, batch)


class CompiledStack:
    """`stack` in compiled pieces. All layers share their code: one for a row alone, one for any other number."""

    def __init__(self, stack: PiecewiseStack, bound: float) -> None:
        # What was compiled for stages that are gone is of no use, and counts against torch's limit.
        if not _STACKS:
            torch.compiler.reset()
        _STACKS.add(self)
        self.stack = stack
        self.layers = stack.layers
        self.before = torch.compile(_before, fullgraph=True)
        self.after = torch.compile(_after, fullgraph=True)
        self._bound = bound
        self._recorded: dict[int, RecordedStack] = {}

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        recorded = self._recorded.get(len(hidden))
        # What came from elsewhere may not be an inference tensor, for which other code would be compiled.
        return self._run(hidden.clone(), batch) if recorded is None else recorded(hidden, batch)

    def _run(self, hidden: Tensor, batch: Batch, *, compiled: bool = True) -> Tensor:
        before, after = (self.before, self.after) if compiled else (_before, _after)
        for layer, encoded in zip(self.layers, self.stack.encode(batch.positions), strict=True):
            hidden = after(layer, hidden, layer.attend(batch, *before(layer, hidden, encoded)))
        return hidden

    def begin(self, hidden: Tensor, positions: Tensor) -> tuple[Sequence[Any], QKV]:
        """Up to the first attention; with all layers' position encodings."""
        encoded = self.stack.encode(positions)
        return encoded, self.before(self.layers[0], hidden, encoded[0])

    def cross(self, index: int, hidden: Tensor, attended: Tensor, encoded: Any) -> tuple[Tensor, QKV]:
        """From the attention of the layer before `index` to its own."""
        hidden = self.after(self.layers[index - 1], hidden, attended)
        return hidden, self.before(self.layers[index], hidden, encoded)

    def compile(self, trial: Trial) -> None:
        """Compiles for a row alone, or for any number, as `trial` has. Raises ConfigError for results that differ."""
        hidden, batch = trial
        self._compare([self._run(hidden, batch, compiled=False)], [self.stack(hidden, batch)])
        for layer, encoded in zip(self.layers, self.stack.encode(batch.positions), strict=True):
            qkv = layer.before(hidden, encoded)
            _mark_rows(hidden, *encoded)
            self._compare(self.before(layer, hidden, encoded), qkv)
            attended = layer.attend(batch, *qkv)
            _mark_rows(attended)
            self._compare([self.after(layer, hidden, attended)], [layer.after(hidden, attended)])

    def record(self, record: Recorder, first: Trial, second: Trial) -> None:
        """Records `first`. Raises ConfigError where `second`, of as many rows, has other results replayed."""
        recorded = self._recorded[len(first.hidden)] = RecordedStack(self, record, first)
        expected = self._run(*second)
        self._compare([recorded(*second)], [expected])

    def _compare(self, found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
        for one, other in zip(found, expected, strict=True):
            error = (one.float() - other.float()).norm() / other.float().norm()
            if other.isfinite().all() and not error <= self._bound:
                raise refusal(f"in compiled pieces, layers compute something else: {float(error):.2g} apart")


class RecordedStack:
    """A CompiledStack for one number of rows, recorded from one attention to the next.

    Results are in memory that the next replay overwrites. Recordings share what memory they can, so they are replayed
    in order.
    """

    def __init__(self, compiled: CompiledStack, record: Recorder, trial: Trial) -> None:
        self._layers = compiled.layers
        self._hidden, self._positions = trial.hidden.clone(), trial.batch.positions.clone()
        self._replays: list[Callable[[], None]] = []
        encoded, qkv = self._add(record, partial(compiled.begin, self._hidden, self._positions))
        self._qkv = [qkv]
        self._attended = self._layers[0].attend(trial.batch, *qkv).clone()
        hidden = self._hidden
        for index, layer in enumerate(self._layers[1:], 1):
            hidden, qkv = self._add(record, partial(compiled.cross, index, hidden, self._attended, encoded[index]))
            self._qkv.append(qkv)
            self._attended.copy_(layer.attend(trial.batch, *qkv))
        self._result = self._add(record, partial(compiled.after, self._layers[-1], hidden, self._attended))

    def _add(self, record: Recorder, piece: Callable[[], T]) -> T:
        replay, result = record(piece)
        replay()
        self._replays.append(replay)
        return result

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        *others, last = self._replays
        self._hidden.copy_(hidden)
        self._positions.copy_(batch.positions)
        for layer, replay, qkv in zip(self._layers, others, self._qkv, strict=True):
            replay()
            self._attended.copy_(layer.attend(batch, *qkv))
        last()
        return self._result.clone()


def _before(layer: PiecewiseLayer, hidden: Tensor, encoded: Any) -> QKV:
    return layer.before(hidden, encoded)


def _after(layer: PiecewiseLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    return layer.after(hidden, attended)


def _mark_rows(*tensors: Tensor) -> None:
    """Has code compiled for any number of rows; a row alone gets code of its own."""
    for tensor in tensors:
        if len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
