"""Experts as any quantizer packs them: each multiplies the rows that chose it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core import DType, Linear, Quantizer
from core.blocks import Plain, PlainLinear
from core.runtime import experts
from core.runtime.experts import PackedExperts, StackedExperts, pack_experts, stacking_works

EXPERTS, OUT, IN = 4, 32, 16
AS: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
ENDS = torch.tensor([3, 3, 10, 11])
"""The second expert has no rows."""


class Halves(Quantizer):
    """A stranger's, which knows of weights alone."""

    name = "halves"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return 2 * shape[0] * shape[1]

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
        return PlainLinear(weight.half().to(dtype), bias)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.tensor_split(ENDS[:-1])
    return torch.cat([own @ weight[n].t() + (bias[n] if bias is not None else 0) for n, own in enumerate(rows)])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("quantizer", [Plain(), Halves()])
def test_each_expert_multiplies_its_rows(quantizer: Quantizer, biased: bool) -> None:
    weight, bias = values(EXPERTS, OUT, IN).half().float(), values(EXPERTS, OUT) if biased else None
    packed = pack_experts(iter(weight), bias, (EXPERTS, OUT, IN), quantizer, **AS)
    x = values(11, IN)
    torch.testing.assert_close(packed(x, ENDS), expected(x, weight, bias))
    torch.testing.assert_close(packed.each(x[8:11], [2, 2, 3]), packed(x, ENDS)[8:11])
    torch.testing.assert_close(packed.each(x[10:], [3]), packed(x, ENDS)[10:])
    torch.testing.assert_close(packed.each(x[:1], [0, 2]), packed.each(x[[0, 0]], [0, 2]))
    assert packed.nbytes == weight.nbytes + (bias.nbytes if bias is not None else 0)


@pytest.mark.parametrize("biased", [False, True])
def test_plain_experts_multiply_at_once_where_that_is_faster(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = values(EXPERTS, OUT, IN), values(EXPERTS, OUT) if biased else None
    each = pack_experts(iter(weight), bias, (EXPERTS, OUT, IN), Plain(), **AS)
    monkeypatch.setattr(experts, "_stacks", lambda *_: stacking_works(**AS))
    stacked = pack_experts(iter(weight), bias, (EXPERTS, OUT, IN), Plain(), **AS)
    assert isinstance(stacked, StackedExperts)
    x = values(11, IN)
    torch.testing.assert_close(stacked(x, ENDS), each(x, ENDS))
    torch.testing.assert_close(stacked.each(x[:2], [3, 1]), each.each(x[:2], [3, 1]))
    torch.testing.assert_close(stacked.each(x[:1], [3, 1]), each.each(x[:1], [3, 1]))
    assert stacked.nbytes == each.nbytes
    assert isinstance(pack_experts(iter(weight), bias, (EXPERTS, OUT, IN), Halves(), **AS), PackedExperts)


def test_each_weight_is_packed_before_the_next_is_read() -> None:
    asked: list[int] = []
    packed: list[int] = []

    class Noted(Halves):
        def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
            packed.append(len(asked))
            return super().pack(weight, bias, dtype=dtype, device=device)

    weights = (asked.append(n) or weight for n, weight in enumerate(values(EXPERTS, OUT, IN)))
    pack_experts(weights, None, (EXPERTS, OUT, IN), Noted(), **AS)
    assert packed == [1, 2, 3, 4]
