"""Checkpoints as publishers quantize them: what each weight stands for, and models that keep the values as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from core_plugin_safetensors.checkpoint import SafetensorsFormat
from safetensors.torch import load_file, save_file

from core import CheckpointError, DType, Source
from core.errors import ConfigError
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime import precision_choice
from core.runtime.model import Model, Precision
from core.runtime.precision_choice import choose_precision
from core.testing.checkpoints import tiny_checkpoint
from core.testing.published import KINDS, publish

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
IDS = [5, 9, 40, 41, 300, 7, 7, 100]


@pytest.fixture(autouse=True)
def what_is_kept_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_choice, "kept_seconds", lambda *_: 0.0)


def tiny(directory: Path, kind: str) -> Path:
    family: Any = "gpt_oss" if kind == "mxfp4" else "llama"
    return tiny_checkpoint(directory, model_type=family, layers=2, fused_experts=kind == "mxfp4")


def logits_of(directory: Path, quant: str, dtype: DType) -> torch.Tensor:
    """The same prompt's, of a model that holds as many bytes as were planned."""
    with Model.open(Source(str(directory)), PLUGINS) as model:
        precision = choose_precision(model, PLUGINS.quantizers, CPU, quant=quant, dtype=dtype)
        stage, _ = model.load_stage(range(2), precision, CPU)
        outer = model.load_embed_and_head(precision, CPU)
        assert stage.nbytes == sum(model.layer_bytes(layer, precision) for layer in range(2))
        hidden = stage.run(outer.embed(torch.tensor(IDS)), [Segment(1, 0, len(IDS), len(IDS))], outputs_only=False)
        return outer.logits(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_keeps_what_was_published(tmp_path: Path, kind: str) -> None:
    original = tiny(tmp_path, kind)
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    dense = load_file(original / "model.safetensors")
    stands_for = publish(original, kind)
    near = 5e-3 if kind == "nf4-nested" else 1e-3
    checkpoint = SafetensorsFormat().open(Source(str(original)))
    assert checkpoint.tensors.keys() == dense.keys()
    for name, expected in stands_for.items():
        info = checkpoint.tensors[name]
        assert info.shape == tuple(expected.shape)
        assert (info.bits, info.form is not None) == (8 if "8" in kind else 4, True)
        torch.testing.assert_close(checkpoint.read(name), expected, atol=near / 10, rtol=near / 10)
    oracle = tmp_path / "dequantised"
    oracle.mkdir()
    (oracle / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({**dense, **{name: w.contiguous() for name, w in stands_for.items()}}, oracle / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    for quant in ("auto", "stored"):
        torch.testing.assert_close(logits_of(original, quant, DType.FP32), expected, atol=2 * near, rtol=near)
    if kind != "mxfp4":  # whose router may choose other experts in bf16
        off = logits_of(original, "stored", DType.BF16) - expected
        assert off.abs().max() < 0.15 * expected.std()


def test_what_is_kept_is_said_and_what_can_not_be_kept_is_refused(tmp_path: Path) -> None:
    original = tiny(tmp_path, "awq")
    with Model.open(Source(str(original)), PLUGINS) as model, pytest.raises(ConfigError, match="are not") as refusal:
        choose_precision(model, PLUGINS.quantizers, CPU, quant="stored")
    assert "--quant int4" in refusal.value.hint
    publish(original, "awq")
    with Model.open(Source(str(original)), PLUGINS) as model:
        precision = choose_precision(model, PLUGINS.quantizers, CPU)
        assert (precision.quantizer.name, precision.of_embed_and_head.quantizer.name) == ("stored", "fp16")
        assert precision.quality.startswith("as the checkpoint is stored")
        again = Precision(PLUGINS.quantizers.get("int4"), DType.FP32, DType.FP32)
        assert model.load_stage(range(2), again, CPU)[0].nbytes == sum(model.layer_bytes(n, again) for n in range(2))


def set_method(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {**config["quantization_config"], **changes}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("awq", {"version": "gemv"}, "AWQ of 4 bits in the order 'gemv'"),
        ("awq", {"bits": 3}, "AWQ of 3 bits"),
        ("gptq", {"desc_act": True}, "columns in the order of their activations"),
        ("gptq", {"bits": 3}, "GPTQ of 3 bits"),
        ("awq", {"quant_method": "quanto"}, "quantized with quanto: that is not read"),
        ("ints-4", {"format": "marlin-24"}, "quantized with compressed-tensors"),
        ("ints-4", {"config_groups": {}}, "quantized with compressed-tensors"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_with_what_to_use_instead(
    tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    publish(tiny(tmp_path, kind), kind)
    set_method(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said) as refusal:
        SafetensorsFormat().open(Source(str(tmp_path)))
    assert "GGUF file" in refusal.value.hint


@pytest.mark.parametrize(
    ("kind", "lacks"), [("awq", "scales"), ("mxfp4", "_scales"), ("mlx-4", "biases"), ("nf4", ".absmax")]
)
def test_a_part_that_lacks_or_is_of_another_shape_is_named(tmp_path: Path, kind: str, lacks: str) -> None:
    publish(tiny(tmp_path, kind), kind)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith(lacks))
    for changed in ({name: weights[name].float()[:1]}, {}):
        rest = {key: tensor for key, tensor in weights.items() if key != name}
        save_file({**rest, **changed}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name.removesuffix(lacks)):
            SafetensorsFormat().open(Source(str(tmp_path)))
