"""What is timed is the whole model, greedily; a profile accounts for all of a token's time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime import bench
from core.runtime.bench import WholeModel, kind_of, made_up_prompt, refuse_too_large
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.open(Source(str(path)), PluginHost.installed()) as opened:
        yield opened


@pytest.fixture
def precision() -> Precision:
    return Precision(PluginHost.installed().quantizers.get("fp16"), DType.FP32, DType.FP32)


def test_its_tokens_are_those_of_transformers(path: Path, model: Model, precision: Precision) -> None:
    from transformers import AutoModelForCausalLM

    prompt = made_up_prompt(model, 20, 10)
    whole, found = WholeModel(model, precision, CPU), []
    tokens, position = prompt, 0
    for _ in range(10):
        token = whole.step(tokens, position)
        found.append(token)
        position += len(tokens)
        tokens = [token]
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + found])).logits[0]
    assert found == logits[19:-1].argmax(-1).tolist()


def test_a_round_times_both_phases(model: Model, precision: Precision) -> None:
    measured = WholeModel(model, precision, CPU).measure([1, 2, 3], tokens=2)
    assert measured.prefill > 0
    assert measured.decode > 0


def test_a_profile_names_what_each_kind_of_operator_takes(model: Model, precision: Precision) -> None:
    profile = WholeModel(model, precision, CPU).profile([1, 2, 3], tokens=2)
    kinds = {kind.name: kind for kind in profile.kinds}
    assert list(kinds) == ["linear", "attention", "norm", "rope", "activation", "other"]
    assert all(kind.seconds > 0 for kind in profile.kinds)
    assert any(name.startswith("silu") for name, _ in kinds["activation"].operators)
    assert min(profile.embed, profile.layers, profile.head, profile.sampling) > 0


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("addmm", "linear"),
        ("_weight_int4pack_mm_for_cpu", "linear"),
        ("_int_mm", "linear"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_fused_rms_norm", "norm"),
        ("cos", "rope"),
        ("silu_", "activation"),
        ("mul", "other"),
        ("view", "other"),
    ],
)
def test_operators_have_kinds(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def test_what_is_longer_than_the_context_is_refused(model: Model) -> None:
    assert len(made_up_prompt(model, 500, 12)) == 500
    with pytest.raises(ConfigError, match=r"500 tokens of prompt and 13 more don't fit.*ends at 512"):
        made_up_prompt(model, 500, 13)


def test_what_does_not_fit_the_device_is_refused_before_it_is_loaded(
    model: Model, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = model.embed_and_head_bytes(precision) + sum(model.layer_bytes(layer, precision) for layer in range(6))
    needed += model.session_cost(range(6), precision)(256)
    monkeypatch.setattr(bench, "free_memory", lambda device: needed)
    refuse_too_large(model, precision, CPU, tokens=200)
    with pytest.raises(ConfigError, match="the whole model does not fit cpu"):
        refuse_too_large(model, precision, CPU, tokens=257)


def test_a_device_that_torch_cannot_profile_is_refused(model: Model, precision: Precision) -> None:
    whole = WholeModel(model, precision, CPU)
    whole._device = torch.device("mps")
    with pytest.raises(ConfigError, match="--profile can't be had on mps"):
        whole.profile([1], tokens=1)
