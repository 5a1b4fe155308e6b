"""Weights as they are published, made into what multiplies, or into the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from core.interfaces.quantizer import Linear
from core.interfaces.stored import StoredForm, StoredWeight, Values
from core.runtime.kernel_choice import normal

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TABLES = {
    Values.INT4: tuple(float(value - 8) for value in range(16)),
    Values.E2M1: (*_E2M1, *(-value for value in _E2M1)),
    Values.FP4: (*_FP4, *(-value for value in _FP4)),
    Values.NF4: _NF4,
}


_SCALES = {1: torch.float8_e8m0fnu, 2: torch.bfloat16, 4: torch.float32}


@cache
def number_table(kind: Values) -> Tensor:
    """The 16 numbers that values of 4 bits stand for, in float32."""
    return torch.tensor(_TABLES[kind], dtype=torch.float32)


@cache
def _pairs(kind: Values, device: torch.device) -> Tensor:
    """What each byte of two values of 4 bits stands for: two float32, as one int64."""
    table, byte = number_table(kind), torch.arange(256)
    return torch.stack((table[byte & 15], table[byte >> 4]), dim=-1).view(torch.int64)[:, 0].to(device)


@cache
def _singles(kind: torch.dtype, device: torch.device) -> Tensor:
    """What each byte of an 8-bit float stands for: torch converts them one at a time, and tens of times as slowly."""
    return torch.arange(256, dtype=torch.uint8).view(kind).float().to(device)


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., columns / 2] -> uint8 [..., columns], the low bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def in_pairs(values: Tensor) -> Tensor:
    """What `nibbles` makes its result of."""
    return values[..., ::2] | values[..., 1::2] << 4


def numbers(values: Tensor, kind: Values) -> Tensor:
    """Stored `values` [rows, ...] as the numbers that they stand for, float32 [rows, columns], without scales."""
    if kind is Values.INT8:
        return values.float()
    places = values.view(torch.uint8).flatten().int()
    table = _pairs(kind, values.device) if kind.bits == 4 else _singles(values.dtype, values.device)
    return table.index_select(0, places).view(torch.float32).view(len(values), -1)


def spread(scales: Tensor, form: StoredForm, shape: tuple[int, int], rows: slice) -> Tensor:
    """What `scales` say of each value of the weight's `rows`: float32, [rows, columns] or what broadcasts to it."""
    wanted = range(rows.start, min(rows.stop, shape[0]))
    if form.rows == 1:
        chosen = scales[rows].float()
    else:
        places = torch.arange(wanted.start, wanted.stop, device=scales.device) // form.rows
        chosen = scales.float()[places]
    return chosen if chosen.shape[1] == 1 else chosen.repeat_interleave(form.columns, 1)[:, : shape[1]]


def dequantise(weight: StoredWeight, rows: slice | None = None) -> Tensor:
    """The `rows` of what it stands for, or all of it: float32 [rows, in_features]."""
    rows = rows if rows is not None else slice(0, weight.shape[0])
    result = numbers(weight.values[rows], weight.form.values)
    result.mul_(spread(weight.scales, weight.form, weight.shape, rows))
    if weight.factor != 1:
        result.mul_(weight.factor)
    if weight.zeros is not None:
        result.add_(spread(weight.zeros, weight.form, weight.shape, rows))
    return result


def made_up(form: StoredForm, shape: tuple[int, int]) -> StoredWeight:
    """A weight of that form and shape, to try what keeps such: it stands for normally distributed numbers."""
    rows, columns = shape
    device, blocks = torch.device("cpu"), form.blocks(shape)
    if form.values.bits == 4:
        values = normal(rows, columns // 2, torch.float32, device).mul_(40).add_(128).clamp_(0, 255).to(torch.uint8)
    elif form.values is Values.INT8:
        values = normal(rows, columns, torch.float32, device).mul_(40).clamp_(-127, 127).to(torch.int8)
    else:
        kind = torch.float8_e4m3fn if form.values is Values.E4M3 else torch.float8_e5m2
        values = normal(rows, columns, torch.float32, device).to(kind)
    scales = torch.ones(blocks, dtype=_SCALES[form.scale_bytes])
    return StoredWeight(form, values, scales, torch.zeros(blocks) if form.zeros else None)


class SideBySide:
    """Linear layers of the same input, whose outputs lie side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)


Pack = Callable[[Tensor, Tensor | None], Linear]
Keep = Callable[[StoredWeight, Tensor | None], Linear]


def fuse(weights: Sequence[Tensor | StoredWeight], bias: Tensor | None, pack: Pack, keep: Keep) -> Linear:
    """One linear layer of all `weights`, fused along the output dimension: those that can be joined are kept as one."""
    runs = list(_joined(weights))
    biases: Sequence[Tensor | None] = [None] * len(runs)
    if bias is not None:
        biases = torch.split_with_sizes(bias, [run.shape[0] for run in runs])
    parts = [
        keep(run, own) if isinstance(run, StoredWeight) else pack(run, own)
        for run, own in zip(runs, biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _joined(weights: Sequence[Tensor | StoredWeight]) -> Iterator[Tensor | StoredWeight]:
    run: list[StoredWeight] = []
    for weight in weights:
        if run and not (isinstance(weight, StoredWeight) and _alike(run[-1], weight)):
            yield _join(run)
            run = []
        if isinstance(weight, StoredWeight):
            run.append(weight)
        else:
            yield weight
    if run:
        yield _join(run)


def _alike(one: StoredWeight, other: StoredWeight) -> bool:
    return one.form == other.form and one.form.rows == 1 and one.factor == other.factor


def _join(run: Sequence[StoredWeight]) -> StoredWeight:
    if len(run) == 1:
        return run[0]
    zeros = [weight.zeros for weight in run if weight.zeros is not None]
    return StoredWeight(
        run[0].form,
        torch.cat([weight.values for weight in run]),
        torch.cat([weight.scales for weight in run]),
        torch.cat(zeros) if zeros else None,
        run[0].factor,
    )
