"""The kernel in C: it multiplies what the weights stand for, and where it can't be compiled others do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core_plugin_quant import kept_floats, native
from core_plugin_quant.stored import Stored

from core import StoredForm, StoredWeight, Values
from core.blocks import dequantise
from core.runtime.stored_weights import made_up

CPU = torch.device("cpu")
MXFP4, NVFP4 = (StoredForm(Values.E2M1, columns, scale_bytes=1) for columns in (32, 16))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(native, "user_cache_path", lambda _name: tmp_path)
    native.library.cache_clear()
    yield tmp_path / "kernels"
    native.library.cache_clear()


FORMS = {
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "nf4": StoredForm(Values.NF4, 32),
    "fp4": StoredForm(Values.FP4, 160, scale_bytes=4),
    "blocks of e4m3": StoredForm(Values.E4M3, 32, 48, 4),
    "rows of e4m3": StoredForm(Values.E4M3, 160, scale_bytes=2),
    "e5m2": StoredForm(Values.E5M2, 160, 66, 4),
}


def varied(form: StoredForm) -> StoredWeight:
    """With scales that differ, and each 8-bit float that is a number."""
    weight, generator = made_up(form, (66, 160)), torch.Generator().manual_seed(0)
    if form.values.bits == 8:
        every = torch.arange(66 * 160).remainder(256).to(torch.uint8).view(weight.values.dtype).view(66, 160)
        numbers = torch.where(every.float().isfinite(), every.float(), 0.0).to(every.dtype)
        scales = torch.rand(weight.scales.shape, generator=generator).div(1000).to(weight.scales.dtype)
        return replace(weight, values=numbers, scales=scales)
    if form.scale_bytes > 1:
        scales = torch.rand(weight.scales.shape, generator=generator)
        return replace(weight, scales=scales.to(weight.scales.dtype))
    exponents = torch.randint(120, 132, weight.scales.shape, generator=generator, dtype=torch.uint8)
    if form is MXFP4:
        return replace(weight, scales=exponents.view(torch.float8_e8m0fnu))
    return replace(weight, scales=(exponents - 119).float().to(torch.float8_e4m3fn), factor=0.25)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_processors_code_gives_what_the_weight_stands_for(
    form: StoredForm, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = torch.backends.cpu.get_cpu_capability()
    if capability != "DEFAULT" and there not in ("AVX512", capability):
        pytest.skip(f"this processor lacks {capability}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    weight = varied(form)
    kernel = kept_floats.kernels(weight, torch.float32)["native"]
    linear = kept_floats.FloatLinear(weight, torch.float32, None, kept_floats.Kernels({"native": kernel}))
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    stands_for = dequantise(weight)
    assert stands_for.isfinite().all()
    within = 1e-6 * float(stands_for.abs().max()) * 160
    torch.testing.assert_close(linear(x), x @ stands_for.t(), atol=within, rtol=1e-4)
    torch.testing.assert_close(linear(torch.eye(160)).t(), stands_for, atol=1e-7, rtol=1e-5)


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("it can't be compiled here")
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    native.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert native.library() is not None


@pytest.mark.parametrize("lacks", ["a compiler", "a compiler that works", "a place"])
def test_without_it_weights_are_dequantised(
    lacks: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "a place":
        cache.write_text("a file is in its place")
    else:
        monkeypatch.setenv("CC", "no-such-compiler" if lacks == "a compiler" else "false")
    assert native.library() is None
    weight = varied(MXFP4)
    linear = Stored().keep(weight, None, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(linear(torch.eye(160)).t(), dequantise(weight), atol=1e-5, rtol=1e-5)
