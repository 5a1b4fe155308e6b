"""A stored tensor as torch's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from core import CheckpointError, TensorInfo
from core_plugin_safetensors.header import damaged

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
PACKED = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "U32": torch.int32, "F8_E8M0": torch.float8_e8m0fnu}
"""What quantized weights are made of besides; of words the bits alone count."""


def read_tensor(path: Path, name: str, stored: TensorInfo, *, packed: bool = False) -> Tensor:
    """A tensor of its own memory, into which it is read: a mapped file's pages would count beside it.

    `packed` says that it is a part of a quantized weight.
    """
    dtype = DTYPES.get(stored.dtype) or (PACKED.get(stored.dtype) if packed else None)
    if dtype is None:
        raise CheckpointError(
            f"{name} is stored as {stored.dtype}",
            "only floating-point weights are read",
            "use the unquantized checkpoint of this model",
        )
    tensor = torch.empty(stored.shape, dtype=dtype)
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            done = file.readinto(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error
    if done < stored.nbytes:
        raise damaged(path.name, f"{name} ends behind its end")
    return tensor
