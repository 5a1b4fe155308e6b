"""A stored tensor as torch's, or as it is stored."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from core import CheckpointError, StoredForm, StoredWeight, Values
from core_plugin_gguf.header import StoredTensor

PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

ROWS_AT_ONCE = 1024
"""Bounds what dequantizing takes beside its result."""


def read_tensor(file: BinaryIO, name: str, stored: StoredTensor, interleaved_heads: int) -> Tensor:
    """A tensor of its own memory. `interleaved_heads`: how many heads' halves are to be taken apart, or 0.

    Raises CheckpointError for a type that can't be dequantized, and where the file ends too early.
    """
    tensor = _plain(file, stored) if stored.type in PLAIN else _dequantized(file, name, stored)
    return _halves_apart(tensor, interleaved_heads) if interleaved_heads else tensor


def read_stored(file: BinaryIO, stored: StoredTensor, form: StoredForm, interleaved_heads: int) -> StoredWeight:
    """A tensor of that `form`, with its rows in the order of `read_tensor`.

    In a block the scale comes first, then the lowest value where it has one, then the values (ggml's ggml-common.h).
    """
    rows, columns = stored.shape
    across = columns // form.columns
    blocks = torch.empty(rows, across, stored.nbytes // (rows * across), dtype=torch.uint8)
    file.seek(stored.start)
    _fill(file, blocks.view(-1).numpy())
    if interleaved_heads:
        blocks = _halves_apart(blocks, interleaved_heads)
    head, values = blocks.tensor_split([blocks.shape[2] - form.columns * form.values.bits // 8], dim=2)
    return _stored(form, head.contiguous(), values.contiguous())


def _stored(form: StoredForm, head: Tensor, values: Tensor) -> StoredWeight:
    """Of bytes [rows, blocks of a row, bytes]."""
    values = values.view(torch.int8) if form.values is Values.INT8 else _neighbours_together(values)
    if form.values is Values.E2M1:
        return StoredWeight(form, values.flatten(1), head.view(torch.float8_e8m0fnu).squeeze(2))
    scales = head.view(torch.float16)
    zeros = scales[..., 1].float().add_(scales[..., 0], alpha=8) if form.zeros else None
    return StoredWeight(form, values.flatten(1), scales[..., 0], zeros)


def _neighbours_together(values: Tensor) -> Tensor:
    """uint8 [..., 16], of a block's first half in the low bits and its second in the high -> values 0 and 1 first."""
    low, high = values & 15, values >> 4
    return torch.cat((low[..., ::2] | low[..., 1::2] << 4, high[..., ::2] | high[..., 1::2] << 4), dim=-1)


def _halves_apart(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of q and k, transformers a head's two halves: whole rows change places."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _plain(file: BinaryIO, stored: StoredTensor) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=PLAIN[stored.type])
    file.seek(stored.start)
    _fill(file, tensor.view(-1).view(torch.uint8).numpy())
    return tensor


def _dequantized(file: BinaryIO, name: str, stored: StoredTensor) -> Tensor:
    tensor = torch.empty(math.prod(stored.shape[:-1]), stored.shape[-1], dtype=torch.float32)
    values = tensor.numpy()
    packed = np.empty((min(ROWS_AT_ONCE, len(values)), stored.nbytes // len(values)), np.uint8)
    file.seek(stored.start)
    try:
        for start in range(0, len(values), ROWS_AT_ONCE):
            rows = packed[: len(values) - start]
            _fill(file, rows.reshape(-1))
            values[start : start + ROWS_AT_ONCE] = dequantize(rows, stored.type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{name} is stored as {stored.type.name}, which can't be dequantized",
            hint="use a file of another quantization, such as Q4_K_M or Q8_0",
        ) from error
    return tensor.reshape(stored.shape)


def _fill(file: BinaryIO, buffer: npt.NDArray[np.uint8]) -> None:
    try:
        done = file.readinto(buffer)  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(f"{file.name} can't be read", str(error)) from error
    if done < buffer.nbytes:
        raise CheckpointError(f"{file.name} was cut short while it was open", hint="load the model again")
