"""Experts are packed as every other linear weight: as small, and with the results of what they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from core_plugin_transformers.names import Recipe
from core_plugin_transformers.spec import TransformersSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

from core import DType, Source
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.model import Model, Precision
from core.testing.families import LAYERS, tiny_family

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "deepseek_v2": {"q_lora_rank": 32},
    "deepseek_v3": {"q_lora_rank": 32},
    "glm4_moe": {},
    "olmoe": {},
    "granitemoe": {},  # one tensor of all experts in the checkpoint
    "gpt_oss": {},  # likewise, with its columns first, biases, and gates between the rows
    "nemotron_h": {},  # no gate
}
OWN = ["qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"]
"""Those that have an architecture of their own beside the generic one."""
ROWS = 20


class Family(NamedTuple):
    path: Path
    architecture: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {kind: tiny_family(folder / kind, kind, **fields) for kind, fields in FAMILIES.items()}


@pytest.fixture(params=[*((kind, "transformers") for kind in FAMILIES), *((kind, kind) for kind in OWN)], ids="-".join)
def family(request: pytest.FixtureRequest, made: dict[str, Path]) -> Family:
    kind, architecture = request.param
    return Family(made[kind], architecture)


@contextmanager
def opened(path: Path, architecture: str = "transformers") -> Iterator[Model]:
    with closing(PLUGINS.open_checkpoint(Source(str(path)))) as checkpoint:
        yield Model(checkpoint, PLUGINS.architectures.get(architecture))


def precision(quant: str, dtype: DType = DType.FP32) -> Precision:
    return Precision(PLUGINS.quantizers.get(quant), dtype, dtype, keep_head=True)


def recipes(model: Model) -> list[Recipe]:
    """What makes the parameters of experts."""
    assert isinstance(model.spec, TransformersSpec)
    return [recipe for layer in model.spec.by_layer for recipe in layer if ".experts." in recipe.target]


def logits(family: Family, how: Precision) -> Tensor:
    """Of a prompt and one token after it, in standard deviations."""
    tokens = torch.randint(3, 250, (ROWS + 1,), generator=torch.Generator().manual_seed(7))
    with opened(*family) as model, torch.inference_mode():
        stage, outer = model.load_stage(range(LAYERS), how, CPU)[0], model.load_embed_and_head(how, CPU)
        prompt, token = outer.embed(tokens).split(ROWS)
        hidden = [stage.run(prompt, [Segment(1, 0, ROWS, ROWS)], outputs_only=False)]
        hidden.append(stage.run(token, [Segment(1, ROWS, 1, 1)], outputs_only=False))
        found = outer.logits(torch.cat(hidden))
    return found / found.std()


def oracle(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 250, (ROWS + 1,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        found: Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens[None]).logits[0]
    return found / found.std()


def dequantised(family: Family, quant: str, to: Path) -> Path:
    """The checkpoint of what the weights of `family` are once they are packed."""
    shutil.copytree(family.path, to)
    tensors = load_file(family.path / "model.safetensors")
    with opened(*family) as model:
        specs = [spec for layer in range(LAYERS) for spec in model.architecture.layer_tensors(model.spec, layer)]
    for spec in specs:
        if spec.packed:
            stored = tensors[spec.name].mT if spec.transposed else tensors[spec.name]
            weights = torch.stack([packed(weight, quant) for weight in stored.reshape(-1, *stored.shape[-2:])])
            tensors[spec.name] = (weights.mT if spec.transposed else weights).reshape(spec.shape).contiguous()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def packed(weight: Tensor, quant: str) -> Tensor:
    linear = PLUGINS.quantizers.get(quant).pack(weight.contiguous(), None, dtype=torch.float32, device=CPU)
    return linear(torch.eye(weight.shape[1])).t()


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_expert_is_packed(kind: str, made: dict[str, Path]) -> None:
    with opened(made[kind]) as model:
        assert recipes(model)
        assert all(recipe.experts for recipe in recipes(model))


def test_experts_have_transformers_results(family: Family) -> None:
    assert (logits(family, precision("fp16")) - oracle(family.path)).abs().max() < 2e-3


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_packed_experts_have_the_results_of_what_they_stand_for(family: Family, quant: str, tmp_path: Path) -> None:
    expected = oracle(dequantised(family, quant, tmp_path / "dequantised"))
    assert (logits(family, precision(quant)) - expected).abs().max() < 2e-3


@pytest.mark.parametrize("quant", ["fp16", "int8", "int4"])
def test_what_is_held_is_what_was_planned(family: Family, quant: str) -> None:
    how = precision(quant, DType.BF16)
    with opened(*family) as model:
        for layers in (range(0, 1), range(1, LAYERS)):
            held = model.load_stage(layers, how, CPU)[0].nbytes
            assert held == sum(model.layer_bytes(layer, how) for layer in layers)


def test_experts_in_int4_take_a_third(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16}
    with opened(tiny_family(tmp_path, "qwen3_moe", **wide)) as model:
        nbytes = {
            quant: model.load_stage(range(LAYERS), precision(quant, DType.BF16), CPU)[0].nbytes
            for quant in ("fp16", "int4")
        }
    assert nbytes["int4"] <= 0.35 * nbytes["fp16"]


def test_experts_of_one_tensor_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    with opened(tiny_family(tmp_path, "gpt_oss")) as model:
        whole = model.checkpoint.read
        monkeypatch.setattr(model.checkpoint, "read", lambda name: (read.append(name), whole(name))[1])
        model.load_stage(range(LAYERS), precision("int8"), CPU)
        weights = {name for recipe in recipes(model) for names in recipe.experts for name in names}
    assert weights
    assert weights.isdisjoint(read)


def test_experts_that_only_the_familys_code_computes_stay_as_they_are(tmp_path: Path) -> None:
    with opened(tiny_family(tmp_path, "llama4_text")) as model:
        assert recipes(model)
        assert not any(recipe.experts for recipe in recipes(model))
