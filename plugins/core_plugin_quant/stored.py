"""`stored`: weights that are quantized in the checkpoint keep the values that they have there; others are as in `fp16`.

Each kind of values is a `Kind` in a file of its own.
"""

from typing import Protocol

import torch
from torch import Tensor

from core import CheckpointError, DType, Embedding, StoredForm, StoredWeight
from core.blocks import Plain
from core_plugin_quant.kept_floats import KeptFloats
from core_plugin_quant.kept_int4 import KeptInt4
from core_plugin_quant.kept_int8 import KeptInt8


class Kind(Protocol):
    """The methods are as those of `core.Quantizer`."""

    def keeps(self, form: StoredForm) -> bool: ...

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int: ...

    def keep(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Embedding:
        """`bias` is in `dtype` on `device` already."""


KINDS: tuple[Kind, ...] = (KeptInt4(), KeptInt8(), KeptFloats())


class Stored(Plain):
    name = "stored"
    quality = "as the checkpoint is stored"

    def keeps(self, form: StoredForm) -> bool:
        return any(kind.keeps(form) for kind in KINDS)

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        return _kind(form).kept_bytes(shape, form, dtype)

    def keep(self, weight: StoredWeight, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Embedding:
        placed = bias.to(device, dtype) if bias is not None else None
        return _kind(weight.form).keep(weight, placed, dtype, device)


def _kind(form: StoredForm) -> Kind:
    for kind in KINDS:
        if kind.keeps(form):
            return kind
    raise CheckpointError(f"weights of the form {form} can't be kept", hint="use --quant int4 or int8")
