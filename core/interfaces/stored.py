"""Weights as they are published, quantized already. A checkpoint format gives them, and a quantizer may keep them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Values(StrEnum):
    """What a stored value is: an integer, an 8-bit float, or the place of a number in a table of 16."""

    INT4 = "int4"
    """0 to 15, and 8 stands for 0."""
    INT8 = "int8"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"
    """4-bit floats of the OCP Microscaling Formats Specification 1.0."""
    NF4 = "nf4"
    """Quantiles of the normal distribution (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314)."""
    FP4 = "fp4"
    """The 4-bit floats of bitsandbytes."""

    @property
    def bits(self) -> int:
        return 8 if self in (Values.INT8, Values.E4M3, Values.E5M2) else 4


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a weight [out_features, in_features] is stored: value * scale, + zero where it has `zeros`.

    Each block of `rows` by `columns` has a scale (and a zero). `scale_bytes` are those of one scale as it is stored.
    """

    values: Values
    columns: int
    rows: int = 1
    scale_bytes: int = 2
    zeros: bool = False

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """[down, across] for a weight of `shape`."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in the form that it is stored in, on the CPU.

    `values` are [out_features, in_features], in int8 or an 8-bit float; those of 4 bits are uint8 [out_features,
    in_features / 2], the first of two in the low bits. `scales` and `zeros` are `StoredForm.blocks` floats, of whatever
    dtype, and each scale stands for itself times `factor`.
    """

    form: StoredForm
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * 8 // self.form.values.bits
