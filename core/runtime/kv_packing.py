"""How keys and values are held: as they are, or in 8 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from core.interfaces.architecture import CacheSize
from core.interfaces.dtypes import DType, KVDType

_STEPS = 127
_LEAST_SCALE = 1e-7
"""What float16 can just tell from 0."""


class KVPacking(ABC):
    @abstractmethod
    def pack(self, rows: Tensor) -> tuple[Tensor, ...]:
        """[heads, rows, width] -> what is held of them: tensors [heads, rows, any width]."""

    @abstractmethod
    def unpack(self, held: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What `pack` has made -> [heads, rows, width]."""

    @abstractmethod
    def token_bytes(self, size: CacheSize, compute: DType) -> int:
        """What a token takes in a layer."""


class AsTheyAre(KVPacking):
    def pack(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def unpack(self, held: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return held[0]

    def token_bytes(self, size: CacheSize, compute: DType) -> int:
        return size.token_values * compute.itemsize


class Int8(KVPacking):
    """Whole numbers from -127 to 127, with a scale in float16 for each head and token."""

    def pack(self, rows: Tensor) -> tuple[Tensor, ...]:
        if rows.shape[-1] == 0:
            return rows.to(torch.int8), rows.half()
        largest = rows.abs().amax(dim=-1, keepdim=True).float()
        scale = (largest / _STEPS).clamp_min(_LEAST_SCALE).half()
        return (rows / scale.float()).round().clamp(-_STEPS, _STEPS).to(torch.int8), scale

    def unpack(self, held: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        numbers, scale = held
        return numbers.to(dtype) if numbers.shape[-1] == 0 else (numbers * scale.float()).to(dtype)

    def token_bytes(self, size: CacheSize, compute: DType) -> int:
        return size.token_values + size.token_rows * DType.FP16.itemsize


AS_THEY_ARE = AsTheyAre()
PACKINGS: dict[KVDType, KVPacking] = {KVDType.AUTO: AS_THEY_ARE, KVDType.INT8: Int8()}
