"""GGUF files of each family: the same logits as transformers of the checkpoint that they were converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core import DType, Source
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime import precision_choice
from core.runtime.model import Model
from core.runtime.precision_choice import choose_precision
from core.testing.checkpoints import tiny_checkpoint, write_gguf

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
IDS = [5, 9, 40, 41, 300, 7, 7, 100, 12, 13, 14, 90, 91, 92, 17, 18, 19, 20, 21, 22, 23, 24]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + 0.3 * n for n in range(8)],
    "attention_factor": 1.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gpt_oss": {"rope_scaling": YARN, "fused_experts": True, "tied": False, "config": {"swiglu_limit": 7.0}},
    "gemma3_text": {
        "layers": 7,
        "config": {"query_pre_attn_scalar": 16, "sliding_window": 16, "sliding_window_pattern": 6},
    },
    "phi3": {"tied": False},
    "granite": {
        "config": {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        }
    },
}


@pytest.fixture(autouse=True)
def what_is_kept_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_choice, "kept_seconds", lambda *_: 0.0)


def checkpoint_of(directory: Path, family: Any, **options: Any) -> Path:
    return tiny_checkpoint(directory, model_type=family, **{"layers": 2, **FAMILIES[family], **options})


def logits_of(path: Path, quant: str) -> torch.Tensor:
    with Model.open(Source(str(path)), PLUGINS) as model:
        precision = choose_precision(model, PLUGINS.quantizers, CPU, quant=quant, dtype=DType.FP32)
        layers = range(model.spec.layers)
        stage, _ = model.load_stage(layers, precision, CPU)
        outer = model.load_embed_and_head(precision, CPU)
        assert stage.nbytes == sum(model.layer_bytes(layer, precision) for layer in layers)
        hidden = stage.run(outer.embed(torch.tensor(IDS)), [Segment(1, 0, len(IDS), len(IDS))], outputs_only=False)
        return outer.logits(hidden)


def oracle(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_its_original_does(tmp_path: Path, family: str) -> None:
    original = checkpoint_of(tmp_path / "original", family)
    file = write_gguf(original, tmp_path / "tiny.gguf", "F32")
    torch.testing.assert_close(logits_of(file, "fp16"), oracle(original), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "rope", [LONGROPE, {"rope_type": "default", "partial_rotary_factor": 0.5}], ids=["long", "part"]
)
def test_phi3_turns_its_heads_as_the_original_does(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = {"original_max_position_embeddings": 512, "sliding_window": 16}
    original = checkpoint_of(tmp_path / "original", "phi3", rope_scaling=rope, config=config)
    file = write_gguf(original, tmp_path / "tiny.gguf", "F32")
    torch.testing.assert_close(logits_of(file, "fp16"), oracle(original), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "quant"),
    [("llama", "Q4_0"), ("llama", "Q4_1"), ("qwen3", "Q8_0"), ("qwen3_moe", "Q4_1"), ("gpt_oss", "MXFP4")],
)
def test_blocks_are_kept_as_they_are_stored(tmp_path: Path, family: str, quant: str) -> None:
    original = checkpoint_of(tmp_path / "original", family)
    file = write_gguf(original, tmp_path / "tiny.gguf", quant)
    with Model.open(Source(str(file)), PLUGINS) as model:
        assert choose_precision(model, PLUGINS.quantizers, CPU).quantizer.name == "stored"
    torch.testing.assert_close(logits_of(file, "stored"), logits_of(file, "fp16"), atol=2e-3, rtol=1e-3)
