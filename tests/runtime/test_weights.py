"""A node reads its own layers and no more, holds what was planned, and says which tensor is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core import DType, Source
from core.errors import CheckpointError, ConfigError
from core.interfaces.checkpoint import Checkpoint
from core.plugins import PluginHost
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision, choose_wire
from core.runtime.weights import StageWeights
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tied": True},
    "llama-untied-biased": {"model_type": "llama", "tied": False, "attention_bias": True},
    "qwen2-untied-sharded": {"model_type": "qwen2", "tied": False, "shards": 3},
    "qwen2-fp16": {"model_type": "qwen2", "dtype": torch.float16},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), layers=4, **VARIANTS[request.param])


@contextmanager
def opened(path: Path) -> Iterator[Model]:
    with Model.open(Source(str(path)), PLUGINS) as model:
        yield model


def precision(quant: str = "fp16", dtype: DType = DType.FP16) -> Precision:
    return Precision(PLUGINS.quantizers.get(quant), dtype, dtype)


def record_reads(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    read = checkpoint.read

    def recorded(name: str) -> torch.Tensor:
        names.append(name)
        return read(name)

    monkeypatch.setattr(checkpoint, "read", recorded)
    return names


@pytest.mark.parametrize("layers", [range(0, 1), range(1, 3), range(3, 4), range(0, 4)], ids=str)
def test_a_stage_reads_each_tensor_of_its_layers_once_and_no_other(
    checkpoint: Path, layers: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(checkpoint) as model:
        names = record_reads(model.checkpoint, monkeypatch)
        seen: list[tuple[int, int]] = []
        _, read_bytes = model.load_stage(layers, precision(), CPU, lambda done, total: seen.append((done, total)))
        assert sorted(names) == sorted(model.layer_tensor_names(layers))
        assert all(int(name.split(".")[2]) in layers for name in names)
        share = sum(model.checkpoint.tensors[name].nbytes for name in names)
        assert read_bytes == share < sum(info.nbytes for info in model.checkpoint.tensors.values())
        assert seen == sorted(seen)
        assert seen[-1] == (share, share)


def test_the_stages_of_any_split_read_the_layers_once_between_them(checkpoint: Path) -> None:
    with opened(checkpoint) as model:
        whole = model.load_stage(range(4), precision(), CPU)[1]
        parts = [model.load_stage(layers, precision(), CPU)[1] for layers in (range(0, 1), range(1, 2), range(2, 4))]
        assert sum(parts) == whole


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("quant", PLUGINS.quantizers.names())
def test_a_stage_holds_what_the_plan_counts_on(checkpoint: Path, quant: str, dtype: DType) -> None:
    held = precision(quant, dtype)
    with opened(checkpoint) as model:
        for layers in (range(0, 2), range(3, 4)):
            stage, _ = model.load_stage(layers, held, CPU)
            assert stage.nbytes == sum(model.layer_bytes(layer, held) for layer in layers)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("quant", PLUGINS.quantizers.names())
def test_the_coordinator_holds_what_it_counts_on(checkpoint: Path, quant: str, dtype: DType) -> None:
    held = precision(quant, dtype)
    with opened(checkpoint) as model:
        specs = model.architecture.non_layer_tensors(model.spec)
        weights = StageWeights(model.checkpoint, specs, held.quantizer, torch_dtype(dtype), CPU)
        model.architecture.build_embed_and_head(model.spec, weights)
        assert weights.nbytes == model.embed_and_head_bytes(held)
        assert weights.read_bytes == sum(model.checkpoint.tensors[spec.name].nbytes for spec in specs)


def test_an_architecture_gets_no_tensor_that_it_did_not_declare(checkpoint: Path) -> None:
    with opened(checkpoint) as model:
        specs = model.architecture.layer_tensors(model.spec, 0)
        weights = StageWeights(model.checkpoint, specs, precision().quantizer, torch.float32, CPU)
        with pytest.raises(KeyError):
            weights.tensor("model.layers.1.input_layernorm.weight")
        assert weights.read_bytes == 0


def test_a_dtype_that_the_device_lacks_is_refused_before_anything_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.runtime.model.refuse_dtype", lambda device, dtype: f"{device} lacks it")
    with opened(checkpoint) as model:
        names = record_reads(model.checkpoint, monkeypatch)
        with pytest.raises(ConfigError, match="--dtype fp16 can't be had: cpu lacks it"):
            model.load_stage(range(4), precision(), CPU)
        assert names == []


def damaged(path: Path, without: str = "", **config: Any) -> Path:
    """A tiny checkpoint that lacks a tensor, or has another config than it should have."""
    tiny_checkpoint(path, layers=2)
    tensors = load_file(path / "model.safetensors")
    tensors.pop(without, None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**stated, **config}), encoding="utf-8")
    return path


@pytest.mark.parametrize("change", [{"rope_scaling": "long"}, {"max_position_embeddings": []}], ids=str)
def test_a_config_that_makes_no_sense_is_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    path = damaged(tmp_path, **change)
    with pytest.raises(CheckpointError, match=r"config does not read.*damaged, or of no llama model"), opened(path):
        pass


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = damaged(tmp_path, without=name)
    with pytest.raises(CheckpointError, match=f"no tensor '{name}'"), opened(path):
        pass


@pytest.mark.parametrize(
    ("config", "name", "stored", "asked"),
    [
        ({"intermediate_size": 96}, "model.layers.0.mlp.gate_proj.weight", "[128, 64]", "[96, 64]"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight", "[32, 64]", "[64, 64]"),
        ({"vocab_size": 400}, "model.embed_tokens.weight", "[320, 64]", "[400, 64]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight", None, "[64]"),
    ],
    ids=str,
)
def test_a_tensor_of_another_shape_is_named(
    tmp_path: Path, config: dict[str, Any], name: str, stored: str | None, asked: str
) -> None:
    path = damaged(tmp_path, **config)
    with pytest.raises(CheckpointError) as refusal, opened(path):
        pass
    text = str(refusal.value)
    assert name in text
    assert asked in text
    if stored is not None:
        assert stored in text
        assert "model.safetensors" in text


class Published:
    """As much of a checkpoint as the wire dtype is chosen by."""

    def __init__(self, **config: Any) -> None:
        self.config = config


@pytest.mark.parametrize("wire", list(DType))
@pytest.mark.parametrize("compute", list(DType))
def test_a_wire_dtype_that_was_asked_for_is_taken(wire: DType, compute: DType) -> None:
    assert choose_wire(wire.value, compute, Published(dtype="bfloat16")) is wire


@pytest.mark.parametrize(
    ("compute", "config", "wire"),
    [
        (DType.FP16, {"dtype": "float16"}, DType.FP16),
        (DType.FP16, {"torch_dtype": "float16"}, DType.FP16),
        (DType.FP16, {"torch_dtype": "bfloat16"}, DType.FP32),
        (DType.FP16, {"dtype": "float32"}, DType.FP32),
        (DType.FP16, {}, DType.FP32),
        (DType.BF16, {"dtype": "float16"}, DType.BF16),
        (DType.BF16, {}, DType.BF16),
        (DType.FP32, {"dtype": "float16"}, DType.FP32),
    ],
    ids=str,
)
def test_auto_takes_fp16_only_where_it_is_proven(compute: DType, config: dict[str, str], wire: DType) -> None:
    assert choose_wire("auto", compute, Published(**config)) is wire


@pytest.mark.parametrize("compute", list(DType))
@pytest.mark.parametrize("wire", list(DType))
def test_the_residual_stream_loses_nothing_but_on_the_wire(compute: DType, wire: DType) -> None:
    residual = torch.finfo(Precision(PLUGINS.quantizers.get("fp16"), compute, wire).residual)
    for other in (torch.finfo(torch_dtype(compute)), torch.finfo(torch_dtype(wire))):
        assert residual.max >= other.max
        assert residual.eps <= other.eps
