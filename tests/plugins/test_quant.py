"""int8 and int4: how far off a packed weight is, that torch's kernels agree with the definition, and what is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from core_plugin_quant import int4, int8
from core_plugin_quant.int4 import Int4, Int4Linear, group_size
from core_plugin_quant.int8 import Int8
from core_plugin_quant.integers import integers_work, multiply_integers
from core_plugin_quant.layout import Blocks, Layout, Rows
from torch import Tensor

from core import ConfigError, DType, Quantizer
from core.blocks import TOLERANCE, Kernel
from core.plugins import PluginHost

CPU = torch.device("cpu")
TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
SHAPES = [(64, 128), (192, 64), (960, 576), (128, 1536), (3, 96), (65, 32), (1, 16), (7, 48), (2048, 2048)]
COUNTS = (0, 1, 2, 5, 17, 130)
QUANTIZERS = PluginHost.installed().quantizers


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantised(linear: int8.Int8Linear | Int4Linear, rows: int) -> Tensor:
    return linear.rows(torch.arange(rows)).float()


@pytest.fixture(params=["fp16", "int8", "int4"])
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    return QUANTIZERS.get(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(DType))
def test_it_holds_what_it_announced_and_multiplies_what_it_looks_up(
    quantizer: Quantizer, dtype: DType, shape: tuple[int, int]
) -> None:
    rows, columns = shape
    table = quantizer.pack_embedding(normal(*shape), dtype=TORCH[dtype], device=CPU)
    linear = quantizer.pack(normal(*shape), None, dtype=TORCH[dtype], device=CPU)
    assert table.nbytes == linear.nbytes == quantizer.packed_bytes(shape, dtype)
    weight = table.rows(torch.arange(rows))
    assert weight.shape == shape
    assert weight.dtype is TORCH[dtype]
    for count in (1, 5, 200):
        x = normal(count, columns, seed=1).to(TORCH[dtype])
        expected = x.float() @ weight.float().t()
        for y in (table(x), linear(x)):
            assert y.shape == (count, rows)
            assert y.dtype is TORCH[dtype]
            assert (y.float() - expected).abs().max() <= TOLERANCE[TORCH[dtype]] * columns**0.5


@pytest.mark.parametrize("dtype", list(DType))
def test_a_bias_is_added_and_held(quantizer: Quantizer, dtype: DType) -> None:
    weight, bias, x = normal(64, 128), normal(64, seed=2), normal(200, 128, seed=1).to(TORCH[dtype])
    plain = quantizer.pack(weight, None, dtype=TORCH[dtype], device=CPU)
    biased = quantizer.pack(weight, bias, dtype=TORCH[dtype], device=CPU)
    assert biased.nbytes - plain.nbytes == 64 * dtype.itemsize
    for count in (1, 200):
        difference = biased(x[:count]).float() - plain(x[:count]).float()
        assert (difference - bias).abs().max() < TOLERANCE[TORCH[dtype]] * 12


@pytest.mark.parametrize("dtype", list(DType))
def test_int8_is_off_by_half_a_step_of_its_row(dtype: DType) -> None:
    weight = normal(64, 96) * normal(64, 1, seed=1).exp()
    linear = Int8().pack(weight, None, dtype=TORCH[dtype], device=CPU)
    assert linear.values.dtype is torch.int8
    assert linear.values.min() >= -127
    torch.testing.assert_close(
        linear.scale.float(), weight.abs().amax(1) / 127, rtol=torch.finfo(TORCH[dtype]).eps, atol=0
    )
    error = (linear.values.float() * linear.scale[:, None].float() - weight).abs()
    assert (error <= linear.scale[:, None].float() * (0.5 + 127 * torch.finfo(TORCH[dtype]).eps)).all()


@pytest.mark.parametrize("columns", [1024, 192, 32, 48], ids=lambda columns: f"columns-{columns}")
@pytest.mark.parametrize("dtype", list(DType))
def test_int4_is_off_by_half_a_step_of_its_group(columns: int, dtype: DType) -> None:
    weight = (normal(8, columns) + 0.1) * normal(8, 1, seed=1).exp()
    linear = Int4().pack(weight, None, dtype=TORCH[dtype], device=CPU)
    group = group_size(columns)
    grouped = weight.view(8, -1, group)
    step = ((grouped.amax(-1) - grouped.amin(-1)) / 15)[..., None]
    error = (dequantised(linear, 8) - weight).abs().view(8, -1, group)
    assert (error <= step * (0.5 + 24 * torch.finfo(TORCH[dtype]).eps)).all()


def test_int4_takes_the_largest_group_that_suits_and_says_where_none_does() -> None:
    assert [group_size(columns) for columns in (4096, 2112, 576, 48)] == [128, 64, 32, 16]
    for refused in (
        lambda: Int4().packed_bytes((4, 100), DType.FP16),
        lambda: Int4().pack(normal(4, 100), None, dtype=torch.float32, device=CPU),
    ):
        with pytest.raises(ConfigError, match="100 input features"):
            refused()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", list(DType))
def test_rows_without_any_difference_are_kept(name: str, dtype: DType) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    linear = QUANTIZERS.get(name).pack_embedding(weight, dtype=TORCH[dtype], device=CPU)
    torch.testing.assert_close(linear.rows(torch.arange(3)).float(), weight, rtol=0.01, atol=0)


@pytest.mark.parametrize("layout", [Rows(), Blocks(64), Blocks(32)], ids=str)
def test_an_order_gives_back_what_was_stored(layout: Layout) -> None:
    values = torch.randint(0, 16, (128, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    stored = torch.zeros(layout.shape(128, 48), dtype=torch.uint8)
    for part in (slice(0, 64), slice(64, 128)):
        layout.pack(values[part], stored, part)
    assert stored.numel() == 128 * 48 // 2
    for part in (slice(0, 128), slice(64, 128)):
        assert torch.equal(layout.unpack(stored, part).transpose(1, 2).reshape(-1, 48), values[part])
    ids = torch.tensor([127, 0, 31, 32, 63, 64, 64])
    assert torch.equal(layout.rows(stored, ids), values[ids])


def check_each(linear: Any, kernels: Mapping[str, Kernel[Any]], rows: int, dtype: torch.dtype) -> None:
    """Each kernel against the weight that is looked up, multiplied in float64."""
    weight = linear.rows(torch.arange(rows)).double()
    for count in COUNTS:
        x = normal(count, weight.shape[1], seed=count).to(dtype)
        expected = x.double() @ weight.t()
        for name, kernel in kernels.items():
            product = kernel(linear, x)
            assert (product.dtype, product.shape) == (dtype, (count, rows)), name
            assert count == 0 or (product - expected).abs().max() <= TOLERANCE[dtype] * weight.shape[1] ** 0.5, name


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [(192, 384), (576, 2048), (64, 48), (65, 96)], ids=str)
def test_each_int4_kernel_gives_what_the_definition_gives(dtype: DType, shape: tuple[int, int]) -> None:
    linear = Int4().pack(normal(*shape), None, dtype=TORCH[dtype], device=CPU)
    check_each(linear, int4.kernels(CPU, TORCH[dtype], linear.layout), shape[0], TORCH[dtype])


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [(192, 384), (576, 2048), (65, 96), (33, 72)], ids=str)
def test_each_int8_kernel_gives_what_the_definition_gives(dtype: DType, shape: tuple[int, int]) -> None:
    linear = Int8().pack(normal(*shape), None, dtype=TORCH[dtype], device=CPU)
    check_each(linear, int8.kernels(CPU, TORCH[dtype], shape[1]), shape[0], TORCH[dtype])


def test_a_layout_without_a_kernel_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (None, Blocks(64), Blocks(32)):
        monkeypatch.setattr(int4, "kernel_layout", lambda *_, found=available: found)
        for shape in ((128, 128), (96, 64), (65, 128)):
            held = Int4().pack(normal(*shape), None, dtype=torch.bfloat16, device=CPU)
            assert isinstance(held.layout, Blocks) is (available is not None and shape[0] % available.block == 0)
            assert held.nbytes == Int4().packed_bytes(shape, DType.BF16)
            torch.testing.assert_close(dequantised(held, shape[0]), normal(*shape), atol=0.35, rtol=0)
            x = normal(200, shape[1], seed=1).bfloat16()
            assert held(x).shape == (200, shape[0])


def test_a_kernel_that_would_read_past_the_end_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "packed_works", lambda device, dtype: True)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda *_: pytest.fail("the kernel was called"))
    linear = Int8().pack(normal(33, 72), None, dtype=torch.bfloat16, device=CPU)
    assert linear(normal(1, 72).bfloat16()).shape == (1, 33)


@pytest.mark.skipif(not integers_work(CPU), reason="int8 products are not exact on this processor")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_integer_products_hold_beside_an_activation_a_thousand_times_as_large(dtype: torch.dtype) -> None:
    x, values = normal(9, 512).to(dtype), torch.randint(-127, 128, (64, 512), dtype=torch.int8)
    x[:, 7], x[3], x[4] = 1000, 0, -x[4].abs()
    values[0], values[1] = 127, -127
    scale = torch.full((64,), 1 / 127, dtype=dtype)
    expected = (x.double() @ values.double().t()) * scale.double()
    product = multiply_integers(x, values, scale)
    assert product.dtype is dtype
    assert (product - expected).abs().max() <= TOLERANCE[dtype] * 1000
    assert torch.equal(product[3], torch.zeros(64, dtype=dtype))
    assert not multiply_integers(torch.full_like(x, torch.nan), values, scale).isfinite().any()


def test_integer_products_that_overflow_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(x: Tensor, weight: Tensor) -> Tensor:
        pairs = (x.int()[:, None, :] * weight.t().int()[None]).view(len(x), weight.shape[1], -1, 2).sum(3)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(2, dtype=torch.int32)

    integers_work.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not integers_work(CPU)
    integers_work.cache_clear()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_it_reports_what_multiplies(name: str) -> None:
    report = QUANTIZERS.get(name).report(CPU)
    assert all(dtype in report for dtype in DType)
