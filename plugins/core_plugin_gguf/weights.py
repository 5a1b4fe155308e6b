"""A stored tensor as torch's."""

from __future__ import annotations

import math
from mmap import mmap

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from core import CheckpointError
from core_plugin_gguf.header import StoredTensor

PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

ROWS_AT_ONCE = 1024
"""Bounds what dequantizing takes beside its result."""

Bytes = npt.NDArray[np.uint8]


def read_tensor(file: mmap, name: str, stored: StoredTensor, interleaved_heads: int) -> Tensor:
    """A tensor of its own memory. `interleaved_heads`: how many heads' halves are to be taken apart, or 0."""
    packed = np.frombuffer(file, np.uint8, stored.nbytes, stored.start)
    if interleaved_heads:
        packed = _halves_apart(packed, interleaved_heads, stored.shape[0] // interleaved_heads)
    if stored.type in PLAIN:
        return torch.from_numpy(packed.copy()).view(PLAIN[stored.type]).reshape(stored.shape)
    return _dequantized(packed.reshape(math.prod(stored.shape[:-1]), -1), name, stored)


def _halves_apart(packed: Bytes, heads: int, head_dim: int) -> Bytes:
    """llama.cpp rotates neighbouring rows of q and k, transformers a head's two halves: whole rows change places."""
    return packed.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(-1)


def _dequantized(rows: Bytes, name: str, stored: StoredTensor) -> Tensor:
    tensor = torch.empty(len(rows), stored.shape[-1])
    values = tensor.numpy()
    try:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            values[part] = dequantize(rows[part], stored.type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{name} is stored as {stored.type.name}, which can't be dequantized",
            hint="use a file of another quantization, such as Q4_K_M or Q8_0",
        ) from error
    return tensor.reshape(stored.shape)
