"""Machines that compute alike pass, whichever their kernels; one whose kernels are broken does not, and it is named."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trio
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.blocks import DecoderLayer, RMSNorm, RotaryEmbedding, Rotation
from core.coordinator import parity_check
from core.coordinator.parity_check import ParityCheck
from core.errors import StageError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.parity import Results, as_bytes, difference, fixed_values, run_layer, run_operations
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
from core.testing.checkpoints import ModelType, tiny_checkpoint
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 300
CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
FAMILIES: list[ModelType] = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
]
KINDS = [("fp16", DType.FP32), ("fp16", DType.FP16), ("fp16", DType.BF16), ("int8", DType.BF16), ("int4", DType.BF16)]


def precision(quant: str, dtype: DType) -> Precision:
    return Precision(PLUGINS.quantizers.get(quant), dtype, dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: tiny_checkpoint(root / family, model_type=family, layers=3) for family in FAMILIES}


@contextmanager
def other_kernels() -> Iterator[None]:
    """Of torch, for the same products."""
    with sdpa_kernel([SDPBackend.MATH]), torch.backends.mkldnn.flags(enabled=False):
        yield


def results(path: Path, layer: int, of: Precision) -> Results:
    with Model.open(Source(str(path)), PLUGINS) as model:
        return run_operations(of, CPU) | run_layer(model, layer, of, CPU)


def test_inputs_are_the_same_bits_everywhere() -> None:
    data = fixed_values(64, 3, seed=7).numpy().tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == "043ecb86f24faca4"
    values = fixed_values(10_000, seed=1)
    assert values.min() >= -1
    assert values.max() < 1
    assert abs(float(values.mean())) < 0.02


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(("quant", "dtype"), KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_machines_that_round_in_other_places_pass(
    models: dict[str, Path], family: str, quant: str, dtype: DType
) -> None:
    expected = results(models[family], 1, precision(quant, dtype))
    with other_kernels():
        given = results(models[family], 1, precision(quant, dtype))
    assert difference(as_bytes(given), expected, dtype) == ""
    assert {"layer 1, a prompt", "layer 1, one token"} < given.keys()


def norm_off_by_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    normalized = RMSNorm._normalized
    monkeypatch.setattr(RMSNorm, "_normalized", lambda self, x: 1.01 * normalized(self, x))


def attention_without_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = F.scaled_dot_product_attention

    def unmasked(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **options: Any) -> Tensor:
        return attend(q, k, v, **{**options, "attn_mask": None})

    monkeypatch.setattr(F, "scaled_dot_product_attention", unmasked)


def rotation_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = RotaryEmbedding.__call__

    def backwards(self: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> Rotation:
        right = rotate(self, positions, dtype)
        return Rotation(right.cos, -right.sin)

    monkeypatch.setattr(RotaryEmbedding, "__call__", backwards)


def silu_that_is_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "silu", F.relu)


def softmax_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "softmax", lambda self, dim: self * torch.nan)


Break = Callable[[pytest.MonkeyPatch], None]
BROKEN = [
    (norm_off_by_a_hundredth, "RMS norm: 1."),
    (attention_without_mask, "attention, a prompt: "),
    (rotation_the_wrong_way, "rotary embedding: "),
    (silu_that_is_relu, "SiLU: "),
    (softmax_of_nothing, "attention, a soft cap: not finite"),
]


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize(("breaks", "named"), BROKEN)
def test_a_broken_operation_is_found_and_named(
    breaks: Break, named: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_operations(precision("fp16", dtype), CPU)
    breaks(monkeypatch)
    assert difference(as_bytes(run_operations(precision("fp16", dtype), CPU)), expected, dtype).startswith(named)


@pytest.mark.parametrize(("quant", "dtype"), KINDS)
def test_a_broken_product_is_found_and_named(quant: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    of = precision(quant, dtype)
    expected = run_operations(of, CPU)
    pack = of.quantizer.pack
    monkeypatch.setattr(of.quantizer, "pack", lambda weight, *rest, **options: pack(weight * 1.05, *rest, **options))
    assert difference(as_bytes(run_operations(of, CPU)), expected, dtype).startswith("linear, a prompt: ")


@pytest.mark.parametrize(("quant", "dtype"), KINDS)
def test_a_layer_that_is_wrong_as_a_whole_is_found(
    models: dict[str, Path], quant: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = precision(quant, dtype)
    expected = results(models["llama"], 1, of)

    def without_mlp(self: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.attention.out(attended)

    monkeypatch.setattr(DecoderLayer, "after", without_mlp)
    assert difference(as_bytes(results(models["llama"], 1, of)), expected, dtype).startswith("layer 1, a prompt: ")


@pytest.mark.parametrize("quant", ["fp16", "int8", "int4"])
def test_results_are_the_same_while_another_thread_builds_a_model_in_another_dtype(quant: str) -> None:
    asked = precision(quant, DType.FP32)
    expected = run_operations(asked, CPU)
    torch.set_default_dtype(torch.bfloat16)
    try:
        given = run_operations(asked, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference(as_bytes(given), expected, DType.FP32) == ""


def test_what_a_device_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Tensor:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(F, "silu", missing)
    with pytest.raises(StageError, match="cpu can't compute SiLU: NotImplementedError: no such kernel"):
        run_operations(precision("fp16", DType.FP32), CPU)


@pytest.mark.parametrize("given", [{}, {"linear, a prompt": b"short"}], ids=["none", "short"])
def test_a_result_that_did_not_come_is_one_that_differs(given: dict[str, bytes]) -> None:
    expected = run_operations(precision("fp16", DType.FP32), CPU)
    assert difference(given, expected, DType.FP32) == "linear, a prompt: no result came"


def test_what_is_not_finite_on_the_coordinator_either_is_not_compared(models: dict[str, Path]) -> None:
    of = precision("fp16", DType.FP32)
    expected = results(models["llama"], 1, of)
    expected["layer 1, a prompt"] = expected["layer 1, a prompt"] * torch.nan
    assert difference(as_bytes(expected), expected, DType.FP32) == ""


def test_the_parity_check_computes_a_layer_whose_files_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, layers=4, shards=2)
    with Model.open(Source(str(path)), PLUGINS) as model:
        own = model.checkpoint.tensors["model.layers.3.mlp.up_proj.weight"].file
        monkeypatch.setattr(model.checkpoint, "path", lambda file: path / file if file == own else None)
        judge = ParityCheck(model, precision("fp16", DType.FP32), CPU)
        assert judge.layer_of(range(0, 4)) == 2
        assert judge.layer_of(range(0, 1)) is None
        monkeypatch.setattr(parity_check, "free_memory", lambda _: 1000)
        assert judge.layer_of(range(0, 4)) == 2, "decided once"
        assert judge.layer_of(range(1, 4)) is None, "there is no room for it"
        assert judge.difference(as_bytes(judge.prepare(None)), None) == ""
        assert judge.difference(as_bytes(judge.prepare(None)), 2) == "layer 2, a prompt: no result came"


async def test_a_node_with_a_broken_kernel_is_named_and_another_takes_its_layers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    normalized = RMSNorm._normalized

    def wrong_on_nodes(self: RMSNorm, x: Tensor) -> Tensor:
        return normalized(self, x) * (1 if threading.current_thread().name == "head" else 1.01)

    with trio.fail_after(SECONDS):
        async with memory_cluster(models["llama"], min_nodes=1) as cluster:
            with monkeypatch.context() as broken:
                broken.setattr(RMSNorm, "_normalized", wrong_on_nodes)
                await cluster.start_node("bad")
                status = await cluster.until(lambda status: "RMS norm" in status.detail)
                assert "node 'bad' computes other results than the coordinator: RMS norm: 1." in status.detail
                [bad] = status.nodes
                assert bad.state == "failed"
                assert "RMS norm" in bad.detail
            await cluster.start_node("good")
            status = await cluster.ready()
            assert {node.node_id: node.layers for node in status.nodes} == {"bad": None, "good": (0, 3)}
