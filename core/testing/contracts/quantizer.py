"""The contract of quantizers."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Linear, Quantizer
from core.runtime.device import torch_dtype

CPU = torch.device("cpu")


class QuantizerContract:
    """The contract of `core.Quantizer`. A subclass named Test... has a fixture `quantizer` that gives one.

    `ERROR` is how far what it multiplies may be from the product with the weight itself, relative to that one's length.
    Of the `SHAPES` those are left out that `packed_bytes` refuses by a ConfigError.
    """

    ERROR: ClassVar[float] = 0.2
    SHAPES: ClassVar[tuple[tuple[int, int], ...]] = ((1, 16), (7, 48), (64, 128))

    @pytest.fixture
    def quantizer(self) -> Quantizer:
        raise NotImplementedError("give a fixture `quantizer`")

    @pytest.fixture(params=list(DType))
    def dtype(self, request: pytest.FixtureRequest) -> DType:
        found: DType = request.param
        return found

    def test_it_holds_as_many_bytes_as_it_announced(self, quantizer: Quantizer, dtype: DType) -> None:
        for shape in self._shapes(quantizer, dtype):
            assert _pack(quantizer, _weight(*shape), dtype).nbytes == quantizer.packed_bytes(shape, dtype)

    @pytest.mark.parametrize("rows", [1, 2, 33])
    def test_it_multiplies_in_the_compute_dtype(self, quantizer: Quantizer, dtype: DType, rows: int) -> None:
        for shape in self._shapes(quantizer, dtype):
            weight, x = _weight(*shape), _rows(rows, shape[1], dtype)
            self._refuse_far(_pack(quantizer, weight, dtype)(x), x.float() @ weight.t(), dtype)

    @pytest.mark.parametrize("stored", list(DType))
    def test_it_packs_a_weight_as_it_was_read(self, quantizer: Quantizer, dtype: DType, stored: DType) -> None:
        weight, x = _weight(64, 128).to(torch_dtype(stored)), _rows(3, 128, dtype)
        self._refuse_far(_pack(quantizer, weight, dtype)(x), x.float() @ weight.float().t(), dtype)

    def test_a_bias_is_added(self, quantizer: Quantizer, dtype: DType) -> None:
        weight, bias, x = _weight(64, 128), _weight(1, 64)[0] * 8, _rows(3, 128, dtype)
        self._refuse_far(_pack(quantizer, weight, dtype, bias)(x), x.float() @ weight.t() + bias, dtype)

    def test_a_weight_of_zeros_multiplies_to_zeros(self, quantizer: Quantizer, dtype: DType) -> None:
        y = _pack(quantizer, torch.zeros(64, 128), dtype)(_rows(3, 128, dtype))
        assert torch.count_nonzero(y) == 0

    def test_an_embedding_looks_up_rows_and_multiplies(self, quantizer: Quantizer, dtype: DType) -> None:
        if not quantizer.packs_embeddings:
            pytest.skip("it packs none")
        weight, x, ids = _weight(64, 128), _rows(3, 128, dtype), torch.tensor([5, 0, 63, 5])
        packed = quantizer.pack_embedding(weight, dtype=torch_dtype(dtype), device=CPU)
        assert packed.nbytes == quantizer.packed_bytes((64, 128), dtype)
        self._refuse_far(packed(x), x.float() @ weight.t(), dtype)
        self._refuse_far(packed.rows(ids), weight[ids], dtype)

    def _shapes(self, quantizer: Quantizer, dtype: DType) -> list[tuple[int, int]]:
        shapes = []
        for shape in self.SHAPES:
            try:
                quantizer.packed_bytes(shape, dtype)
            except ConfigError:
                continue
            shapes.append(shape)
        assert shapes, f"it packs none of {self.SHAPES}"
        return shapes

    def _refuse_far(self, found: Tensor, expected: Tensor, dtype: DType) -> None:
        assert found.shape == expected.shape
        assert found.dtype == torch_dtype(dtype)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error <= self.ERROR


def _pack(quantizer: Quantizer, weight: Tensor, dtype: DType, bias: Tensor | None = None) -> Linear:
    return quantizer.pack(weight, bias, dtype=torch_dtype(dtype), device=CPU)


def _weight(rows: int, columns: int) -> Tensor:
    weight: Tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5
    return weight


def _rows(rows: int, columns: int, dtype: DType) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    return x.to(torch_dtype(dtype))
