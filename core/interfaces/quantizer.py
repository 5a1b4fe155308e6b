"""The seam for weight formats: how a linear layer's weight is packed, sized and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from core.interfaces.dtypes import DType
from core.interfaces.stored import StoredForm, StoredWeight

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


class GroupedLinear(Protocol):
    """A packed weight for each expert, which multiplies the rows that chose it."""

    @property
    def nbytes(self) -> int:
        """Bytes held by all of them, as of `Linear`."""

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features], in the compute dtype.

        Rows lie in the order of their experts, and `ends`, int64 [experts], says where those of each one end.
        """

    def each(self, x: Tensor, experts: Sequence[int]) -> Tensor:
        """What each of a few `experts` makes of its own row of x, or all make of its only one.

        [len(experts) or 1, in_features] -> [len(experts), out_features].
        """


class Embedding(Linear, Protocol):
    """A packed weight whose rows can be looked up too, as an embedding's are."""

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [rows] -> [rows, in_features], in the compute dtype."""


class Quantizer(ABC):
    """Two verbs: say how large a weight will be, and pack it. Packing is per tensor, as it is read.

    Weights that are quantized in the checkpoint can be kept as they are by who `keeps` their form. From others they get
    what they dequantise to.
    """

    name: ClassVar[str]
    packs_embeddings: ClassVar[bool] = False
    """Whether `pack_embedding` packs. If not, embeddings and heads tied to them stay in the compute dtype."""
    compute: ClassVar[DType | None] = None
    """What layers compute in where the user names nothing; None: what suits the checkpoint and the device."""
    quality: ClassVar[str] = ""
    """What packing costs in quality, as measured, in a short phrase for who chooses it. Empty: nothing to say."""

    @abstractmethod
    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        """Bytes that a weight of `shape` (out_features, in_features) holds when computing in `dtype`."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        """Packs `weight` [out_features, in_features], as it was read, to multiply in `dtype` on `device`."""

    def pack_embedding(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> Embedding:
        """As `pack`, of an embedding. Called only where `packs_embeddings`."""
        return cast("Embedding", self.pack(weight, None, dtype=dtype, device=device))

    def keeps(self, form: StoredForm) -> bool:
        """Whether `keep` takes weights of this form."""
        return False

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        """As `packed_bytes`, of a weight that is kept in `form`."""
        raise NotImplementedError

    def keep(self, weight: StoredWeight, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        """Holds `weight` with the values that it is stored with, to multiply in `dtype` on `device`.

        Where `packs_embeddings`, it can be kept as an `Embedding`, and is one.
        """
        raise NotImplementedError

    def report(self, device: torch.device) -> str:
        """What multiplies on `device`, for `core doctor`: found by trying. Empty where there is nothing to say."""
        return ""
