"""Layers are held once: what stages share is read once, counted once, and gone when nobody has it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core import DType, Source
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.held_layers import HeldLayers, Part, Parts, Variant, as_ranges
from core.runtime.model import Model, Precision
from core.runtime.speed import weight_speed
from core.runtime.stage import Stage
from core.runtime.weights import StageWeights
from core.testing.checkpoints import tiny_checkpoint
from core.testing.contracts import HeldLayersContract
from core.testing.families import tiny_family

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
VARIANT, OTHER = Variant(bytes(32), "int8", "fp32"), Variant(bytes(32), "int8", "bf16")
TRANSFORMERS = ["gpt2", "olmoe", "minicpm3", "qwen3_next", "granitemoe"]
"""Among them families whose experts are many tensors in the checkpoint, and one where they are one."""


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "phi3", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def of_blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), model_type=request.param, layers=3)


@pytest.fixture(scope="module", params=TRANSFORMERS)
def of_transformers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory.mktemp(request.param), request.param)


class TestBlocks(HeldLayersContract):
    @pytest.fixture
    def checkpoint(self, of_blocks: Path) -> Path:
        return of_blocks


class TestTransformers(HeldLayersContract):
    @pytest.fixture
    def checkpoint(self, of_transformers: Path) -> Path:
        return of_transformers


def test_the_contract_finds_an_architecture_that_changes_what_it_is_given(
    of_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, tensor = HeldLayersContract(), StageWeights.tensor
    monkeypatch.setattr(StageWeights, "tensor", lambda weights, name: tensor(weights, name).mul_(1.5))
    with Model.open(Source(str(of_blocks)), PLUGINS) as opened, pytest.raises(AssertionError, match="not equal"):
        contract.test_stages_of_the_same_held_layers_compute_the_same_in_turn(opened, precision())


@pytest.fixture(scope="module", params=["llama", "olmoe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_checkpoint(folder, layers=4) if request.param == "llama" else tiny_family(folder, request.param)
    with Model.open(Source(str(path)), PLUGINS) as opened:
        yield opened


def precision(quant: str = "int8") -> Precision:
    return Precision(PLUGINS.quantizers.get(quant), DType.FP32, DType.FP32)


def add(held: HeldLayers, model: Model, layers: range, variant: Variant = VARIANT) -> tuple[Stage, int]:
    """A stage of what is held and the rest, which is held then; and the bytes that were read."""
    missing, parts = held.missing(variant, layers), held.parts(variant, layers)
    stage, read = model.load_stage(layers, precision(), CPU, parts=parts)
    names = {layer: model.layer_tensor_names([layer]) for layer in missing}
    held.add(variant, parts, names, [bytes([layer]) * 32 for layer in missing])
    return stage, read


def stored(model: Model, layers: range) -> int:
    return sum(model.checkpoint.tensors[name].nbytes for name in model.layer_tensor_names(layers))


def logits(model: Model, *stages: Stage) -> Tensor:
    outer = model.load_embed_and_head(precision(), CPU)
    hidden = outer.embed(torch.arange(3, 12))
    for stage in stages:
        hidden = stage.run(hidden, [Segment(1, 0, len(hidden), len(hidden))], outputs_only=False)
    return outer.logits(hidden)


def test_what_overlaps_is_read_and_held_once(model: Model) -> None:
    held = HeldLayers()
    assert add(held, model, range(1, 3))[1] == stored(model, range(1, 3))
    assert add(held, model, range(2, 4))[1] == stored(model, range(3, 4))
    assert add(held, model, range(4))[1] == stored(model, range(1))
    assert add(held, model, range(1, 4))[1] == 0
    assert held.nbytes == sum(model.layer_bytes(layer, precision()) for layer in range(4))
    assert held.spans() == {VARIANT: [range(4)]}


def test_any_cut_of_held_layers_has_the_logits_of_a_fresh_load(model: Model) -> None:
    held, fresh = HeldLayers(), model.load_stage(range(4), precision(), CPU)[0]
    expected = logits(model, fresh)
    add(held, model, range(1, 3))
    for cuts in ((0, 4), (0, 1, 4), (0, 2, 4)):
        stages = [add(held, model, range(*cut))[0] for cut in pairwise(cuts)]
        torch.testing.assert_close(logits(model, *stages), expected)


def test_stages_of_the_same_layers_have_caches_of_their_own(model: Model) -> None:
    held = HeldLayers()
    first, second = (add(held, model, range(4))[0] for _ in range(2))
    logits(model, first)
    assert (len(first.caches), len(second.caches)) == (1, 0)


def test_what_is_dropped_is_read_again(model: Model) -> None:
    held = HeldLayers()
    add(held, model, range(4))
    before = held.nbytes
    freed = held.drop(VARIANT, 2)
    assert held.drop(VARIANT, 2) == 0, "somebody else may let go of it at the same time"
    assert freed == model.layer_bytes(2, precision()) == before - held.nbytes
    assert held.spans() == {VARIANT: [range(2), range(3, 4)]}
    assert add(held, model, range(1, 4))[1] == stored(model, range(2, 3))


def test_other_variants_share_nothing(model: Model) -> None:
    held = HeldLayers()
    add(held, model, range(2))
    assert add(held, model, range(2), OTHER)[1] == stored(model, range(2))
    held.drop(VARIANT, 0)
    held.drop(VARIANT, 1)
    assert held.spans() == {OTHER: [range(2)]}
    assert held.all() == [(OTHER, 0), (OTHER, 1)]


def test_a_load_that_fails_leaves_nothing(model: Model) -> None:
    held = HeldLayers()

    def fail(name: str) -> None:
        raise OSError(name)

    with pytest.raises(OSError, match="layers"):
        model.load_stage(range(2), precision(), CPU, None, fail, held.parts(VARIANT, range(2)))
    assert held.nbytes == 0
    assert held.missing(VARIANT, range(2)) == [0, 1]


def test_a_tensor_that_two_layers_share_goes_with_the_last_of_them() -> None:
    held, parts = HeldLayers(), Parts()
    for key, names in ({"a": ("x", "shared"), "b": ("y",), "c": ("shared",)}).items():
        parts["tensor", key] = Part(key, 10, names)
    held.add(VARIANT, parts, {0: ["x", "shared"], 1: ["y", "shared"]}, [b"", b""])
    assert held.nbytes == 30
    assert held.drop(VARIANT, 0) == 0
    assert held.drop(VARIANT, 1) == 30


def test_what_a_layer_was_proven_to_be_is_compared() -> None:
    held = HeldLayers()
    held.add(VARIANT, {}, {3: [], 4: []}, [bytes(32), b""])
    assert held.other_layer(VARIANT, range(3, 5), [bytes(32), bytes(32)]) is None
    assert held.other_layer(VARIANT, range(2, 4), [b"2" * 32, b""]) is None
    assert held.other_layer(VARIANT, range(2, 4), [b"2" * 32, b"3" * 32]) == 3


def test_results_are_remembered_while_their_layer_is_held() -> None:
    held = HeldLayers()
    held.remember(VARIANT, {None: {"x": b"1"}})
    assert held.parity(VARIANT, None) is None
    held.add(VARIANT, {}, {0: [], 1: []}, [b"", b""])
    held.remember(VARIANT, {None: {"x": b"1"}, 1: {"y": b"2"}, 5: {"z": b"3"}})
    assert [held.parity(VARIANT, layer) for layer in (None, 1, 5)] == [{"x": b"1"}, {"y": b"2"}, None]
    held.drop(VARIANT, 1)
    assert [held.parity(VARIANT, layer) for layer in (None, 1)] == [{"x": b"1"}, None]
    held.drop(VARIANT, 0)
    assert held.parity(VARIANT, None) is None


def test_numbers_in_any_order_are_ranges() -> None:
    assert as_ranges([7, 1, 2, 9, 8]) == [range(1, 3), range(7, 10)]
    assert as_ranges([]) == []


def test_a_devices_speed_is_bytes_in_a_second() -> None:
    assert all(10**7 < speed < 10**13 for speed in weight_speed(CPU))
