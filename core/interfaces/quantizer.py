"""The seam for weight formats: how a linear layer's weight is packed, sized and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from core.interfaces.dtypes import DType

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Linear(Protocol):
    """A packed weight that multiplies."""

    @property
    def nbytes(self) -> int:
        """Bytes held, weight and bias: for a weight without a bias equal to `Quantizer.packed_bytes` of its shape."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features], in the compute dtype."""


class Quantizer(ABC):
    """Two verbs: say how large a weight will be, and pack it. Packing is per tensor, as it is read."""

    name: ClassVar[str]

    @abstractmethod
    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        """Bytes that a weight of `shape` (out_features, in_features) holds when computing in `dtype`."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        """Packs `weight` [out_features, in_features], as read from the checkpoint, to multiply in `dtype` on `device`."""
