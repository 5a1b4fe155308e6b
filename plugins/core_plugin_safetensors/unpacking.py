"""From words of 32 bits to values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core import Values
from core.blocks import in_pairs, nibbles


def words_to_values(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits of a word first."""
    as_bytes = words.contiguous().view(torch.uint8)
    return nibbles(as_bytes) if bits == 4 else as_bytes.clone()


def in_order(values: Tensor, order: Sequence[int]) -> Tensor:
    """[rows, columns], where of each eight columns the i-th belongs in the place `order[i]`."""
    eights = values.view(len(values), -1, len(order))
    places = torch.tensor(order).argsort()
    return eights[..., places].flatten(1)


def as_stored(values: Tensor, kind: Values) -> Tensor:
    """uint8 [rows, columns], in whatever strides, as `StoredWeight.values` are."""
    values = values.contiguous()
    return in_pairs(values) if kind is Values.INT4 else values.bitwise_xor(128).view(torch.int8)
