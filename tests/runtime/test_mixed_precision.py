"""fp16 layers over the wire that `auto` chooses: the fp32 model's logits, wherever the residual stream goes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from core import DType, Source
from core.errors import StageError
from core.plugins import PluginHost
from core.protocol.tensors import from_wire, to_wire
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision, choose_wire
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
TOLERANCE = 0.06
"""In standard deviations of the logits, as for a model that is fp16 throughout."""
FP16_MAX = torch.finfo(torch.float16).max


class Piece(NamedTuple):
    rows: int
    session: int = 1
    position: int = 0
    outputs: int = 0


def pipeline_logits(path: Path, tokens: list[int], wire: str, cuts: list[range]) -> torch.Tensor:
    with Model.open(Source(str(path)), PLUGINS) as model, torch.inference_mode():
        chosen = choose_wire(wire, DType.FP16, model.checkpoint)
        precision = Precision(PLUGINS.quantizers.get("fp16"), DType.FP16, chosen)
        outer = model.load_embed_and_head(precision, CPU)
        hidden = outer.embed(torch.tensor(tokens))
        for layers in cuts:
            stage, _ = model.load_stage(layers, precision, CPU)
            arrived = from_wire(to_wire(hidden, torch_dtype(chosen)))
            hidden = stage.run(arrived, [Piece(len(tokens))], outputs_only=False)
        return outer.logits(from_wire(to_wire(hidden, torch_dtype(chosen))))


def oracle(path: Path, tokens: list[int]) -> tuple[torch.Tensor, float]:
    """The fp32 logits, and how far the residual stream goes between the layers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        result = model(torch.tensor([tokens]), output_hidden_states=True)
    assert result.logits.std() > 0.1, "flat logits would agree with anything"
    return result.logits[0], max(float(states.abs().max()) for states in result.hidden_states[:-1])


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    ids: list[int] = torch.randint(0, 250, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    return ids


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers each compute within fp16's range, but add up to more."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("far"), layers=6, attention_bias=True)
    weights = load_file(path / "model.safetensors")
    for layer in range(6):
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] *= 2000
        weights[f"model.layers.{layer}.self_attn.o_proj.bias"][0] = 20_000
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


CUTS = [[range(0, 6)], [range(0, 3), range(3, 6)], [range(0, 1), range(1, 4), range(4, 6)]]


@pytest.mark.parametrize("cuts", CUTS, ids=len)
def test_logits_are_the_fp32_models_within_the_tolerance_of_fp16(
    tmp_path: Path, tokens: list[int], cuts: list[range]
) -> None:
    path = tiny_checkpoint(tmp_path, layers=6)
    expected, _ = oracle(path, tokens)
    assert (pipeline_logits(path, tokens, "auto", cuts) - expected).abs().max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("cuts", CUTS, ids=len)
def test_a_residual_stream_beyond_fp16_survives(far: Path, tokens: list[int], cuts: list[range]) -> None:
    expected, reach = oracle(far, tokens)
    assert reach > FP16_MAX
    assert (pipeline_logits(far, tokens, "auto", cuts) - expected).abs().max() < TOLERANCE * expected.std()


def test_over_an_fp16_wire_it_would_not(far: Path, tokens: list[int]) -> None:
    with pytest.raises(StageError, match="not finite"):
        pipeline_logits(far, tokens, "fp16", CUTS[1])
