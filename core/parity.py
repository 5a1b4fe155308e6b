"""Whether two machines compute the same: small operations by name, and one real layer, each on a fixed input.

A node runs them when it has loaded its layers, and the coordinator compares the results with its own, so that a device
with a broken kernel is found, and the operation named, before anyone reads what it makes of a text.

Inputs come from integer arithmetic, which is exact everywhere. A result is told by its products with `COLUMNS`
vectors of signs: what differs in any column shows in them, whatever the width.

How far correct results are apart follows from rounding, which each device does in an order of its own. So the bounds
go with the compute dtype. Measured on a CPU (benchmarks/parity.py), each result against that of other kernels for the
same: products converted to float32 or not, packed weights multiplied by torch's kernels or dequantised, attention
fused or not; all quantizers, eleven families, five layers of SmolLM2-135M. The most that a row was apart:

    dtype   products and attention   a layer (the median row)
    fp32    3e-7                     2e-6
    fp16    6e-4                     2e-3
    bf16    4e-3                     2e-2

Other operations came out the same. Devices may round those in the last place, and sums of products in more: GPUs,
which were not measured, add them in lower precision where torch lets them. The bounds leave room for that. In a layer
a row may be far off for a good reason: a router that chose another of two experts that were all but equal. Hence the
median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.blocks import RMSNorm, RotaryEmbedding, gelu_tanh
from core.errors import StageError
from core.guard import compute_layers
from core.interfaces.architecture import LayerStack
from core.interfaces.dtypes import DType
from core.runtime.device import torch_dtype
from core.runtime.held_layers import Parts
from core.runtime.kv_cache import CacheStore, SegmentBatch
from core.runtime.model import Model, Precision

ROWS, DECODED = 24, 3
"""Of a prompt, and of the tokens after it."""
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
COLUMNS = 32

Results = dict[str, Tensor]
"""By operation: float32 [rows, COLUMNS] on the CPU."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a row may be from the coordinator's, relative to its length."""

    product: float
    """Any row of a product or of attention."""
    other: float
    """Any row of another operation."""
    layer: float
    """The median row of a layer."""

    def judge(self, name: str, errors: Tensor) -> tuple[Tensor, float]:
        """Of a result with these `errors` of its rows: the one that counts, and what is allowed."""
        if name.startswith("layer "):
            return errors.median(), self.layer
        return errors.max(), self.product if name.startswith(("linear", "attention")) else self.other


BOUNDS = {
    DType.FP32: Bound(product=1e-3, other=1e-4, layer=1e-2),
    DType.FP16: Bound(product=5e-3, other=2e-3, layer=2e-2),
    DType.BF16: Bound(product=2e-2, other=8e-3, layer=8e-2),
}
"""At least four times what was measured. A norm that is off by 1% is found in each dtype."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A segment of the one session here."""

    position: int
    rows: int
    session: int = 1

    @property
    def outputs(self) -> int:
        return self.rows


def fixed_values(*shape: int, seed: int) -> Tensor:
    """float32 in [-1, 1), the same bits on any machine: the integer hash lowbias32 (Chris Wellons) of each index."""
    x = torch.arange(math.prod(shape), dtype=torch.int64) + (seed << 24)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    values: Tensor = (x.double() / 2**31 - 1).float()
    return values.view(shape)


@torch.inference_mode()
def run_operations(precision: Precision, device: torch.device) -> Results:
    """Raises StageError naming the operation that the device can't compute."""
    return {name: _told(name, call, device) for name, call in _operations(precision, device).items()}


def run_layer(
    model: Model,
    layer: int,
    precision: Precision,
    device: torch.device,
    seen: Callable[[str], None] | None = None,
    parts: Parts | None = None,
) -> Results:
    """What `layer` adds to a prompt, and to tokens after it, computed in turn.

    Its weights are read, unless `parts` has them (see `Model.load_layers`).
    """
    only = range(layer, layer + 1)
    stack = model.load_layers(only, precision, device, None, seen, parts)
    return _run_layer(stack, layer, model.spec.hidden_size, device)


@torch.inference_mode()
def _run_layer(stack: LayerStack, layer: int, hidden_size: int, device: torch.device) -> Results:
    caches = CacheStore(range(layer, layer + 1))
    hidden = fixed_values(ROWS + DECODED, hidden_size, seed=9).to(device)
    added = []
    for part in [_Rows(0, ROWS), *(_Rows(position, 1) for position in range(ROWS, ROWS + DECODED))]:
        rows = hidden[part.position : part.position + part.rows]
        batch = SegmentBatch([part], caches, device)
        added.append(_summary(compute_layers(stack, rows, batch) - rows))
        batch.commit()
    return {f"layer {layer}, a prompt": added[0], f"layer {layer}, one token": torch.cat(added[1:])}


def as_bytes(results: Results) -> dict[str, bytes]:
    return {name: summary.numpy().tobytes() for name, summary in results.items()}


def difference(given: Mapping[str, bytes], expected: Results, dtype: DType) -> str:
    """Which of the `expected` results is not among those that were `given`, and by how much; empty where all are."""
    bound = BOUNDS[dtype]
    for name, summary in expected.items():
        data = given.get(name, b"")
        if len(data) != summary.nbytes:
            return f"{name}: no result came"
        if not torch.isfinite(summary).all():
            continue
        errors = row_errors(torch.frombuffer(bytearray(data), dtype=torch.float32).view_as(summary), summary)
        error, allowed = bound.judge(name, errors)
        if not error <= allowed:
            off = f"{float(error):.2%} off" if error.isfinite() else "not finite"
            return f"{name}: {off} in {dtype}, where rounding explains {allowed:.2%}"
    return ""


def row_errors(given: Tensor, expected: Tensor) -> Tensor:
    """How far each row of `given` is from the expected one, relative to that one's length."""
    apart, length = (given - expected).square().sum(dim=1), expected.square().sum(dim=1)
    return (apart / length.clamp_min(1e-30)).sqrt()


def _told(name: str, call: Callable[[], Tensor], device: torch.device) -> Tensor:
    try:
        return _summary(call())
    # What is missing on a device is said in any of these ways.
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise StageError(f"{device} can't compute {name}", f"{type(error).__name__}: {error}") from error


def _summary(result: Tensor) -> Tensor:
    rows = result.cpu().double().flatten(1)
    signs = fixed_values(rows.shape[1], COLUMNS, seed=10).sign().double()
    told: Tensor = rows @ signs / math.sqrt(rows.shape[1])
    return told.float()


def _operations(precision: Precision, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    dtype = torch_dtype(precision.compute)

    def given(*shape: int, seed: int) -> Tensor:
        return fixed_values(*shape, seed=seed).to(device, dtype)

    weight, bias = fixed_values(WIDTH, WIDTH, seed=1) / 16, fixed_values(WIDTH, seed=2)
    linear = precision.quantizer.pack(weight, bias, dtype=dtype, device=device)
    norm = RMSNorm(1 + given(WIDTH, seed=3) / 8, 1e-6)
    rotary = RotaryEmbedding(2.0 ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float32) / 4))
    x, gate = given(ROWS, WIDTH, seed=4), given(ROWS, WIDTH, seed=5) * 4
    heads = given(ROWS, HEADS, HEAD_DIM, seed=6)
    attend = _Attention(heads * 3, given(ROWS, KV_HEADS, HEAD_DIM, seed=7), given(ROWS, KV_HEADS, HEAD_DIM, seed=8))
    positions = torch.arange(100, 100 + ROWS, device=device)
    return {
        "linear, a prompt": lambda: linear(x),
        "linear, one token": lambda: linear(x[:1]),
        "RMS norm": lambda: norm(x),
        "rotary embedding": lambda: rotary(positions, dtype)(heads),
        "attention, a prompt": lambda: attend(ROWS),
        "attention, a prompt in parts": lambda: attend(ROWS - 8, 8),
        "attention, one token": lambda: attend(ROWS - 1, 1),
        "attention, a window": lambda: attend(ROWS, window=8),
        "attention, a soft cap": lambda: attend(ROWS, softcap=2.0),
        "SiLU": lambda: F.silu(gate) * x,
        "GELU": lambda: gelu_tanh(gate) * x,
        "softmax": lambda: gate.softmax(dim=-1),
    }


class _Attention:
    """Attention of `q` over `k` and `v`, in the parts that it is given in; what the last part attends to."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._q, self._k, self._v = q, k, v

    def __call__(self, *parts: int, window: int | None = None, softcap: float | None = None) -> Tensor:
        caches, position, attended = CacheStore(range(1)), 0, self._q
        for rows in parts:
            batch = SegmentBatch([_Rows(position, rows)], caches, self._q.device)
            part = slice(position, position + rows)
            q, k, v = self._q[part], self._k[part], self._v[part]
            attended = batch.attend(0, q, k, v, scale=HEAD_DIM**-0.5, window=window, softcap=softcap)
            batch.commit()
            position += rows
        return attended
