"""In which order int4 values lie in memory.

In every order a run of values is stored in half as many bytes: the run's first half in the low four bits, its second
half in the high ones.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of what is stored, in bytes, for values [rows, columns]."""

    def pack(self, values: Tensor, stored: Tensor, part: slice) -> None:
        """Stores the values [rows, columns] of the rows `part`."""

    def unpack(self, stored: Tensor, part: slice) -> Tensor:
        """The rows `part`, transposed, in blocks of as many rows each: uint8 [blocks, columns, rows of a block]."""

    def rows(self, stored: Tensor, ids: Tensor) -> Tensor:
        """uint8 [len(ids), columns]."""


class Rows:
    """Row by row; a run is a row."""

    def __str__(self) -> str:
        return "by rows"

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // 2

    def pack(self, values: Tensor, stored: Tensor, part: slice) -> None:
        stored[part] = _halved(values)

    def unpack(self, stored: Tensor, part: slice) -> Tensor:
        return _whole(stored[part]).t()[None]

    def rows(self, stored: Tensor, ids: Tensor) -> Tensor:
        return _whole(stored[ids])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `block` rows, column by column; a run is a column of a block. The rows are a multiple of `block`.

    So torch's kernel for CPUs reads them, with `block` values in four vector registers of floats
    (`_convert_weight_to_int4pack_for_cpu`).
    """

    block: int

    def __str__(self) -> str:
        return f"in blocks of {self.block}"

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows // self.block, columns, self.block // 2

    def pack(self, values: Tensor, stored: Tensor, part: slice) -> None:
        stored[self._blocks(part)] = _halved(values.view(-1, self.block, values.shape[1]).transpose(1, 2))

    def unpack(self, stored: Tensor, part: slice) -> Tensor:
        """In blocks of half as many rows as are stored together."""
        given = stored[self._blocks(part)]
        blocks, columns, half = given.shape
        halves = given.new_empty(blocks, 2, columns, half)
        torch.bitwise_and(given, 15, out=halves[:, 0])
        torch.bitwise_right_shift(given, 4, out=halves[:, 1])
        return halves.view(2 * blocks, columns, half)

    def rows(self, stored: Tensor, ids: Tensor) -> Tensor:
        row, half = ids % self.block, self.block // 2
        columns = stored[ids // self.block, :, row % half]
        return (columns >> (4 * (row // half))[:, None]).to(torch.uint8) & 15

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block, part.stop // self.block)


def _halved(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return first | second << 4


def _whole(stored: Tensor) -> Tensor:
    return torch.cat((stored & 15, stored >> 4), dim=-1)
