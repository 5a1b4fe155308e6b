import pytest
import torch
from core_plugin_example.bf16 import BF16

from core import Quantizer
from core.testing.contracts import QuantizerContract


class TestBF16(QuantizerContract):
    ERROR = 0.01

    @pytest.fixture
    def quantizer(self) -> Quantizer:
        return BF16()


def test_it_holds_two_bytes_for_each_value_whatever_it_computes_in() -> None:
    linear = BF16().pack(torch.randn(8, 16), None, dtype=torch.float32, device=torch.device("cpu"))
    assert linear.nbytes == 8 * 16 * 2
