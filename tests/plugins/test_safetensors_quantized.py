"""FP8 checkpoints: weights as their definition has them, and through a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from core_plugin_safetensors.checkpoint import SafetensorsFormat
from safetensors.torch import load_file, save_file

from core import CheckpointError, Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantized(directory: Path, kind: str, block: int = 48) -> dict[str, torch.Tensor]:
    """Makes a tiny checkpoint one of FP8 weights; returns what they stand for."""
    tiny_checkpoint(directory, layers=2)
    weights, stands_for = load_file(directory / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weight = weights[name].float()
        scale = scale_of(weight, kind, block)
        wide = scale
        if kind == "blocks":
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        packed = (weight / wide).to(FP8)
        stands_for[name] = packed.float() * wide
        weights[name] = packed
        weights[name + ("_scale_inv" if kind == "blocks" else "_scale")] = scale
        weights[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
    save_file(weights, directory / "model.safetensors")
    method: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    if kind == "blocks":
        method = {"quant_method": "fp8", "weight_block_size": [block, block]}
    set_method(directory, method)
    return stands_for


def scale_of(weight: torch.Tensor, kind: str, block: int) -> torch.Tensor:
    if kind == "tensor":
        return weight.abs().max() / LARGEST
    if kind == "rows":
        return weight.abs().amax(1, keepdim=True) / LARGEST
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, block, columns, block).amax((1, 3)).clamp(min=1e-6) / LARGEST


def set_method(directory: Path, method: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_fp8_weights_are_what_they_stand_for(tmp_path: Path, kind: str) -> None:
    stands_for = quantized(tmp_path / "model", kind)
    checkpoint = SafetensorsFormat().open(Source(str(tmp_path / "model")))
    assert not [name for name in checkpoint.tensors if "scale" in name]
    for name, expected in stands_for.items():
        assert torch.equal(checkpoint.read(name), expected), name
        assert torch.equal(torch.stack(list(checkpoint.slices(name))), expected), name
    assert checkpoint.read("model.norm.weight").dtype != FP8


def test_a_model_of_fp8_weights_computes_as_the_one_that_they_stand_for(tmp_path: Path) -> None:
    stands_for = quantized(tmp_path / "model", "blocks")
    plain = tmp_path / "plain"
    tiny_checkpoint(plain, layers=2)
    save_file({**load_file(plain / "model.safetensors"), **stands_for}, plain / "model.safetensors")
    assert torch.allclose(hidden_of(tmp_path / "model"), hidden_of(plain), atol=1e-5)


def hidden_of(directory: Path) -> torch.Tensor:
    """What the layers make of five tokens."""
    plugins = PluginHost.installed()
    with Model.open(Source(str(directory)), plugins) as model:
        precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
        stage, _ = model.load_stage(range(2), precision, torch.device("cpu"))
        outer = model.load_embed_and_head(precision, torch.device("cpu"))
        hidden = outer.embed(torch.arange(5, 10))
        return stage.run(hidden, [Segment(1, 0, 5, 5)], outputs_only=True)


def test_a_scale_that_fits_no_block_is_refused(tmp_path: Path) -> None:
    quantized(tmp_path / "model", "blocks")
    set_method(tmp_path / "model", {"quant_method": "fp8", "weight_block_size": [16, 16]})
    checkpoint = SafetensorsFormat().open(Source(str(tmp_path / "model")))
    with pytest.raises(CheckpointError, match=r"a scale of \[2, 2\] fits no weight of \[64, 64\]"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")
