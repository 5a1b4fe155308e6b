"""`stored`: weights keep the values that they were published with, in as many bytes as were announced."""

from __future__ import annotations

import pytest
import torch
from core_plugin_quant import kept_floats, kept_int8
from core_plugin_quant.stored import Stored
from torch import Tensor

from core import DType, StoredForm, StoredWeight, Values
from core.blocks import TOLERANCE, dequantise
from core.runtime.stored_weights import fuse

CPU = torch.device("cpu")
TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
ROWS, COLUMNS = 192, 256
FORMS = [
    StoredForm(Values.INT4, 32),
    StoredForm(Values.INT4, 128, zeros=True),
    StoredForm(Values.INT4, COLUMNS, zeros=True),
    StoredForm(Values.INT8, 32),
    StoredForm(Values.INT8, 64, zeros=True),
    StoredForm(Values.INT8, COLUMNS),
    StoredForm(Values.E2M1, 32, scale_bytes=1),
    StoredForm(Values.E2M1, 16, scale_bytes=1),
    StoredForm(Values.NF4, 64),
    StoredForm(Values.FP4, 64, scale_bytes=4),
    StoredForm(Values.E4M3, 128, 128, 4),
    StoredForm(Values.E4M3, COLUMNS, scale_bytes=2),
    StoredForm(Values.E5M2, COLUMNS, ROWS, 4),
]
_SCALES = {2: torch.float16, 4: torch.float32}


def weight_of(form: StoredForm, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> StoredWeight:
    """Random values of that form, which stand for numbers of about 1."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(form.blocks((rows, columns)), generator=generator) + 0.5
    if form.values.bits == 4:
        values = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    elif form.values is Values.INT8:
        values = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        small /= 64
    else:
        kind = torch.float8_e4m3fn if form.values is Values.E4M3 else torch.float8_e5m2
        values = torch.randn(rows, columns, generator=generator).to(kind)
    if form.scale_bytes == 1:
        scales = torch.randint(125, 129, small.shape, generator=generator, dtype=torch.uint8)
        scales = scales.view(torch.float8_e8m0fnu) if form.columns == 32 else small.to(torch.float8_e4m3fn)
    else:
        scales = (small / 4 if form.values is Values.INT4 else small).to(_SCALES[form.scale_bytes])
    zeros = torch.randn(small.shape, generator=generator) * scales.float() if form.zeros else None
    return StoredWeight(form, values, scales, zeros, 0.5 if form.columns == 16 else 1.0)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", list(DType))
def test_it_multiplies_what_the_stored_weight_stands_for(form: StoredForm, dtype: DType) -> None:
    weight, stored = weight_of(form), Stored()
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(9))
    assert stored.keeps(form)
    linear = stored.keep(weight, None, dtype=TORCH[dtype], device=CPU)
    biased = stored.keep(weight, bias, dtype=TORCH[dtype], device=CPU)
    assert linear.nbytes == stored.kept_bytes(weight.shape, form, dtype)
    assert biased.nbytes - linear.nbytes == ROWS * dtype.itemsize
    expected = dequantise(weight)
    ids = torch.tensor([5, 0, ROWS - 1])
    rounding = torch.finfo(TORCH[dtype]).eps
    assert linear.rows(ids).dtype is TORCH[dtype]
    assert (linear.rows(ids) - expected[ids]).abs().max() <= 2 * rounding * expected.abs().max()
    for count in (1, 3, 150):
        x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count)).to(TORCH[dtype])
        product = x.double() @ expected.double().t()
        bound = 1.5 * TOLERANCE[TORCH[dtype]] * product.std()
        for y, wanted in ((linear(x), product), (biased(x), product + bias)):
            assert y.dtype is TORCH[dtype]
            assert (y - wanted).abs().max() <= bound


@pytest.mark.parametrize("form", FORMS[:5:3] + FORMS[6:8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_kernel_gives_what_the_weight_stands_for(form: StoredForm, dtype: torch.dtype) -> None:
    weight = weight_of(form)
    linear = Stored().keep(weight, None, dtype=dtype, device=CPU)
    if isinstance(linear, kept_int8.HalvesLinear):
        kernels = kept_int8.kernels(CPU, dtype, linear.layout)
    elif isinstance(linear, kept_floats.FloatLinear):
        kernels = kept_floats.kernels(linear.weight, dtype)
    else:
        return
    for count in (1, 5, 40):
        x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count)).to(dtype)
        expected = x.double() @ dequantise(weight).double().t()
        for name, kernel in kernels.items():
            assert (kernel(linear, x) - expected).abs().max() <= TOLERANCE[dtype] * expected.std(), name


@pytest.mark.parametrize("values", [Values.INT4, Values.INT8], ids=str)
def test_a_group_of_any_even_size_is_held_in_powers_of_two(values: Values) -> None:
    form = StoredForm(values, 96, zeros=True)
    weight = weight_of(form, 64, 192)
    linear = Stored().keep(weight, None, dtype=torch.float32, device=CPU)
    assert linear.nbytes == Stored().kept_bytes((64, 192), form, DType.FP32)
    torch.testing.assert_close(linear(torch.eye(192)).t(), dequantise(weight), atol=1e-4, rtol=1e-4)


def test_forms_that_no_kind_keeps() -> None:
    for form in (StoredForm(Values.INT4, 24), StoredForm(Values.INT8, 32, 2), StoredForm(Values.NF4, 64, zeros=True)):
        assert not Stored().keeps(form)


def test_fused_weights_are_one_where_their_scales_allow_it() -> None:
    kept: list[tuple[int, ...]] = []

    def pack(weight: Tensor, bias: Tensor | None) -> Tensor:
        return Stored().pack(weight, bias, dtype=torch.float32, device=CPU)

    def keep(weight: StoredWeight, bias: Tensor | None) -> Tensor:
        kept.append(weight.shape)
        return Stored().keep(weight, bias, dtype=torch.float32, device=CPU)

    dense = torch.randn(64, COLUMNS)
    parts = [weight_of(FORMS[0]), weight_of(FORMS[0], 64, seed=1), dense, weight_of(FORMS[10], seed=2)]
    parts += [weight_of(FORMS[10], seed=3)]
    whole = torch.cat([part if isinstance(part, Tensor) else dequantise(part) for part in parts])
    bias, x = torch.randn(len(whole)), torch.randn(3, COLUMNS)
    linear = fuse(parts, bias, pack, keep)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, whole, bias), atol=1e-3, rtol=1e-3)
    assert kept == [(256, COLUMNS), (ROWS, COLUMNS), (ROWS, COLUMNS)]
    assert (
        linear.nbytes
        == sum(
            Stored().kept_bytes(part.shape, part.form, DType.FP32) if isinstance(part, StoredWeight) else part.nbytes
            for part in parts
        )
        + bias.nbytes
    )
