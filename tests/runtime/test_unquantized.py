"""A product that is computed in a wider dtype, part by part, is the product."""

import pytest
import torch
import torch.nn.functional as F

from core.runtime import unquantized
from core.runtime.unquantized import multiply, multiply_wide_by_columns


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300, 1000), (3, 200_000), (131, 1000), (2100, 200)], ids=str)
def test_parts_make_the_whole(shape: tuple[int, int], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquantized, "matmul_dtype", lambda *_: torch.float32)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, shape[1], generator=generator).half() / 30 for rows in (shape[0], 7))
    added = torch.randn(shape[0], generator=generator).half() if bias else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    by_columns = multiply_wide_by_columns(x, weight.t().contiguous().t(), added)
    for product in (multiply(x, weight, added), by_columns):
        assert product.dtype is torch.float16
        assert (product - expected).abs().max() < 4e-3 * max(1.0, float(expected.abs().max()))
