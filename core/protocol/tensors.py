"""Hidden states <-> bytes: raw little-endian values, without a copy where the dtype stays."""

from __future__ import annotations

import sys
from typing import cast

import torch

from core.errors import ProtocolError
from core.protocol.fields import Tensor

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensors travel little-endian, and this machine is big-endian")


def to_wire(hidden: torch.Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, width] on any device -> message. A value beyond fp16's range saturates to its largest, never to inf."""
    values = hidden.to("cpu", dtype)
    if dtype is torch.float16 and hidden.dtype is not torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    values = values.contiguous()
    rows, width = values.shape
    data = values.view(torch.uint8).numpy().reshape(-1).data if values.numel() else b""
    return Tensor(_NAMES[dtype], rows, width, cast(bytes, data))


def from_wire(tensor: Tensor) -> torch.Tensor:
    """Message -> [rows, width] on the CPU; Raises ProtocolError where the sizes don't agree."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"unknown tensor dtype {tensor.dtype!r}", f"there are: {', '.join(_DTYPES)}")
    if len(tensor.data) != tensor.rows * tensor.width * dtype.itemsize:
        raise ProtocolError(
            "a tensor's size does not match its shape",
            f"{len(tensor.data)} bytes for {tensor.rows} x {tensor.width} {tensor.dtype}",
        )
    if not tensor.data:
        return torch.empty(tensor.rows, tensor.width, dtype=dtype)
    # Large tensors come as a bytearray already; torch wants a writable buffer, so a small one is copied.
    data = tensor.data if isinstance(tensor.data, bytearray) else bytearray(tensor.data)
    return torch.frombuffer(data, dtype=dtype).view(tensor.rows, tensor.width)
