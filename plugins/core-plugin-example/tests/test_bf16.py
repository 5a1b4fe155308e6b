import pytest
import torch
from core_plugin_example.bf16 import BF16

from core import DType

CPU = torch.device("cpu")


def test_it_holds_as_many_bytes_as_it_announced() -> None:
    linear = BF16().pack(torch.randn(8, 16), None, dtype=torch.float32, device=CPU)
    assert linear.nbytes == BF16().packed_bytes((8, 16), DType.FP32) == 8 * 16 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_multiplies_the_rounded_weight_in_the_compute_dtype(dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(8, 16), torch.randn(8, dtype=dtype), torch.randn(3, 16, dtype=dtype)
    product = BF16().pack(weight, bias, dtype=dtype, device=CPU)(x)
    assert product.dtype is dtype
    torch.testing.assert_close(product, torch.nn.functional.linear(x, weight.bfloat16().to(dtype), bias))
