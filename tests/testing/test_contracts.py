"""A contract finds what breaks it, and shows the values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core import Checkpoint, CheckpointFormat, DType, Quantizer, Source
from core.blocks import DecoderArchitecture, DecoderLayer, Plain
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
from core.testing import contracts
from core.testing.checkpoints import tiny_checkpoint
from core.testing.contracts import ArchitectureContract, CheckpointFormatContract, QuantizerContract


@pytest.mark.parametrize("kind", ["architecture", "checkpoint", "planner", "quantizer", "transport"])
def test_assertions_show_what_they_compared(kind: str) -> None:
    module = importlib.import_module(f"{contracts.__name__}.{kind}")
    assert type(module.__loader__).__name__ == "AssertionRewritingHook"


class Doubled(Plain):
    name = "doubled"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return 2 * super().packed_bytes(shape, dtype)


class Biasless(Plain):
    name = "biasless"

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Any:
        return super().pack(weight, None, dtype=dtype, device=device)


class Coarse(Plain):
    name = "coarse"

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Any:
        return super().pack(weight.sign() * weight.abs().mean(), bias, dtype=dtype, device=device)


CONTRACT = QuantizerContract()


@pytest.mark.parametrize(
    ("quantizer", "ask"),
    [
        (Doubled(), CONTRACT.test_it_holds_as_many_bytes_as_it_announced),
        (Biasless(), CONTRACT.test_a_bias_is_added),
        (Coarse(), lambda quantizer, dtype: CONTRACT.test_it_multiplies_in_the_compute_dtype(quantizer, dtype, 3)),
    ],
)
def test_a_careless_quantizer_is_found(quantizer: Quantizer, ask: Callable[[Quantizer, DType], None]) -> None:
    with pytest.raises(AssertionError, match=r"assert [\d.]+ (==|<=) [\d.]+"):
        ask(quantizer, DType.FP32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


class Halved(DecoderLayer):
    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return super().after(hidden, attended) / 2


def test_an_architecture_whose_layers_compute_something_else_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderArchitecture, "layer_class", lambda self, shape: Halved)
    plugins, contract = PluginHost.installed(), ArchitectureContract()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(tiny)), plugins) as model:
        with pytest.raises(AssertionError, match="split into"):
            contract.test_every_split_has_the_expected_logits(tiny, model, precision, DType.FP32)
        with pytest.raises(AssertionError, match=r"assert [\d.]+ <= "):
            contract.test_a_session_that_is_cut_back_goes_on_from_there(tiny, model, precision)


def test_a_format_whose_files_are_anywhere_is_found(tiny: Path, tmp_path: Path) -> None:
    opened = PluginHost.installed().open_checkpoint(Source(str(tiny)))

    class Open(CheckpointFormat):
        name = "open"

        def recognises(self, source: Source) -> bool:
            return True

        def open(self, source: Source) -> Checkpoint:
            return opened

    contract = CheckpointFormatContract()
    with pytest.raises(AssertionError):
        contract.test_it_recognises_its_own_and_nothing_else(Open(), tiny, tmp_path)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        contract.test_a_file_that_is_cut_short_is_named(Open(), tiny, tmp_path)
    vars(opened)["path"] = lambda file: tiny / file
    with pytest.raises(AssertionError):
        contract.test_what_is_none_of_its_files_is_nowhere(opened, "../nothing")
    vars(opened)["read"] = lambda name: torch.zeros(3)
    with pytest.raises(AssertionError, match=r"assert \(3,\) == "):
        contract.test_each_tensor_is_as_its_index_says(opened)
    opened.close()
