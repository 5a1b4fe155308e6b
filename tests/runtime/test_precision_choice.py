"""What `--quant auto` and `--dtype auto` stand for, and that nothing else is ever changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_plugin_quant.int4 import Int4
from core_plugin_quant.int8 import Int8
from core_plugin_quant.stored import Stored

from core import DType, Quantizer, Source, StoredForm, StoredWeight, Values
from core.errors import PluginError
from core.plugins import PluginHost
from core.runtime import precision_choice, speed
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.runtime.precision_choice import choose_precision
from core.testing.checkpoints import tiny_checkpoint, write_gguf

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
Seconds = dict[DType, float]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("plain"), layers=2)


@contextmanager
def opened(path: Path, layers: int | None = None, head: int | None = None, **config: Any) -> Iterator[Model]:
    """The model at `path`, whose tensors have so many bits as far as it says, and whose config says this as well."""
    with Model.open(Source(str(path)), PLUGINS) as model:
        checkpoint = model.checkpoint
        checkpoint.config = {**checkpoint.config, **config}
        checkpoint.tensors = {
            name: replace(info, bits=layers if ".layers." in name else head)
            for name, info in checkpoint.tensors.items()
        }
        yield model


def chosen(model: Model, **asked: Any) -> Precision:
    return choose_precision(model, PLUGINS.quantizers, CPU, **asked)


def names(precision: Precision) -> tuple[str, str]:
    return precision.quantizer.name, precision.of_embed_and_head.quantizer.name


@pytest.mark.parametrize(
    ("layers", "head", "expected"),
    [
        (1, 4, ("int4", "int4")),
        (4, 6, ("int4", "int8")),
        (4, 16, ("int4", "fp16")),
        (5, 8, ("int8", "int8")),
        (8, None, ("int8", "fp16")),
        (16, 16, ("fp16", "fp16")),
        (32, 8, ("fp16", "int8")),
        (None, None, ("fp16", "fp16")),
    ],
)
def test_weights_are_packed_in_as_many_bits_as_they_are_stored_in(
    path: Path, layers: int | None, head: int | None, expected: tuple[str, str]
) -> None:
    with opened(path, layers, head) as model:
        assert names(chosen(model)) == expected


@pytest.mark.parametrize(
    ("kind", "expected"), [("Q4_0", "stored"), ("Q5_0", "int8"), ("Q8_0", "stored"), ("F16", "fp16")]
)
def test_a_gguf_file_says_in_how_many_bits(
    path: Path, tmp_path: Path, kind: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_choice, "kept_seconds", lambda *_: 0.0)
    file = write_gguf(path, tmp_path / "tiny.gguf", kind)
    with Model.open(Source(str(file)), PLUGINS) as model:
        assert names(chosen(model)) == (expected, expected)


def test_what_int4_can_not_pack_is_packed_in_int8(tmp_path: Path) -> None:
    odd = tiny_checkpoint(tmp_path, layers=2, hidden_size=40, intermediate=88)
    with opened(odd, 4, 4) as model:
        assert names(chosen(model)) == ("int8", "int8")


@pytest.mark.parametrize("quant", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("dtype", list(DType))
def test_what_is_said_is_taken(path: Path, quant: str, dtype: DType) -> None:
    with opened(path, 4, 8, dtype="float16") as model:
        precision = chosen(model, quant=quant, dtype=dtype, wire="fp32")
        assert names(precision) == (quant, quant)
        assert (precision.compute, precision.wire) == (dtype, DType.FP32)
        assert names(chosen(model, keep_head=True)) == ("int4", "plain")
        assert chosen(model, dtype=dtype).compute is dtype
        with pytest.raises(PluginError, match="no quantizer named 'zip'"):
            chosen(model, quant="zip")


@pytest.fixture
def fp16_is_slower(monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], list[tuple[int, int]]]:
    """Has fp16 take so many times as long as bf16, or compute what is wrong. The shapes that were measured."""

    def slower(times: float | None) -> list[tuple[int, int]]:
        shapes: list[tuple[int, int]] = []

        def measured(quantizer: Quantizer, shape: tuple[int, int], dtypes: object, device: object) -> Seconds:
            shapes.append(shape)
            return {DType.BF16: 1.0} if times is None else {DType.BF16: 1.0, DType.FP16: times}

        monkeypatch.setattr(precision_choice, "product_seconds", measured)
        return shapes

    return slower


@pytest.mark.parametrize("quant", ["auto", "int8", "int4"])
@pytest.mark.parametrize("published", ["bfloat16", "float32", None])
def test_layers_compute_in_bf16_where_fp16_could_overflow(
    path: Path, fp16_is_slower: Callable[[float | None], object], quant: str, published: str | None
) -> None:
    fp16_is_slower(0.1)
    with opened(path, dtype=published, torch_dtype=published) as model:
        precision = chosen(model, quant=quant)
        assert (precision.compute, precision.wire) == (DType.BF16, DType.BF16)


@pytest.mark.parametrize(
    ("times", "expected"), [(0.5, DType.FP16), (1.1, DType.FP16), (2.0, DType.BF16), (None, DType.BF16)]
)
def test_a_model_of_fp16_computes_in_it_unless_bf16_is_measured_to_be_much_faster(
    path: Path, fp16_is_slower: Callable[[float | None], list[tuple[int, int]]], times: float | None, expected: DType
) -> None:
    shapes = fp16_is_slower(times)
    with opened(path, dtype="float16") as model:
        precision = chosen(model)
        assert (precision.compute, precision.wire) == (expected, expected)
    assert shapes == [(128, 64)]


@pytest.mark.parametrize(
    ("refused", "published", "expected"),
    [
        ({DType.BF16}, "float16", DType.FP16),
        ({DType.FP16}, "float16", DType.BF16),
        ({DType.BF16}, "bfloat16", DType.FP32),
        ({DType.BF16, DType.FP16}, "float16", DType.FP32),
    ],
)
def test_a_dtype_that_the_device_lacks_is_not_chosen(
    path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[DType], published: str, expected: DType
) -> None:
    monkeypatch.setattr(precision_choice, "refuse_dtype", lambda _, dtype: "no" if dtype in refused else None)
    with opened(path, dtype=published) as model:
        assert chosen(model).compute is expected


def test_a_quantizer_may_say_what_to_compute_in(path: Path) -> None:
    class Exact(Int8):
        name = "exact"
        compute = DType.FP32

    host = PluginHost.installed()
    host.quantizers.add("exact", Exact())
    with opened(path) as model:
        assert choose_precision(model, host.quantizers, CPU, quant="exact").compute is DType.FP32
        assert choose_precision(model, host.quantizers, CPU, quant="exact", dtype=DType.BF16).compute is DType.BF16


@pytest.mark.parametrize(
    ("asked", "bits", "said"),
    [
        ({}, 4, "F32 packed again: perplexity within 1%"),
        ({}, 16, "as the checkpoint is stored: perplexity within 1%"),
        ({"dtype": DType.FP32}, 16, "as the checkpoint"),
        ({"quant": "int4"}, 4, Int4.quality),
        ({"quant": "int8"}, 16, Int8.quality),
    ],
)
def test_what_it_costs_in_quality_is_said(path: Path, asked: dict[str, Any], bits: int, said: str) -> None:
    with opened(path, bits, bits) as model:
        assert chosen(model, **asked).quality.startswith(said)


def test_a_product_is_measured_once_in_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[torch.dtype] = []

    class Noted(Int8):
        name = "noted"

        def pack(self, *args: Any, **kwargs: Any) -> Any:
            packed.append(kwargs["dtype"])
            return super().pack(*args, **kwargs)

    dtypes = (DType.BF16, DType.FP16)
    first, second = (speed.product_seconds(Noted(), (256, 128), dtypes, CPU) for _ in range(2))
    assert set(first) == set(dtypes)
    assert all(spent > 0 for spent in first.values())
    assert second == first
    assert packed == [torch_dtype(dtype) for dtype in dtypes]


@pytest.mark.parametrize("form", [StoredForm(Values.E4M3, 128, 128), StoredForm(Values.INT8, 32)], ids=str)
def test_what_is_kept_is_measured_once(form: StoredForm) -> None:
    kept: list[tuple[int, ...]] = []

    class Noted(Stored):
        name = f"noted {form.values}"

        def keep(self, weight: StoredWeight, *args: Any, **kwargs: Any) -> Any:
            kept.append(weight.shape)
            return super().keep(weight, *args, **kwargs)

    first, second = (speed.kept_seconds(Noted(), form, (256, 128), DType.BF16, CPU) for _ in range(2))
    assert first == second > 0
    assert kept == [(256, 128)]


def test_a_dtype_in_which_a_product_is_wrong_is_not_among_those_measured() -> None:
    class Wrong(Int8):
        name = "wrong"

        def pack(self, weight: Any, bias: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
            return super().pack(-weight if dtype is torch.float16 else weight, bias, dtype=dtype, device=device)

    assert set(speed.product_seconds(Wrong(), (256, 128), (DType.BF16, DType.FP16), CPU)) == {DType.BF16}


def test_an_fp8_checkpoint_is_kept_where_that_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    tiny_checkpoint(tmp_path, layers=2)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = torch.tensor(1.0)
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}), encoding="utf-8")
    with Model.open(Source(str(tmp_path)), PLUGINS) as model:
        for seconds, expected in ((0.0, "stored"), (1e9, "int8")):
            monkeypatch.setattr(precision_choice, "kept_seconds", lambda *_, spent=seconds: spent)
            assert names(chosen(model)) == (expected, "fp16")
        assert names(chosen(model, quant="stored")) == ("stored", "fp16")
