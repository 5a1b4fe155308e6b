"""Weights in oneDNN's order multiply, and are looked up, as they do row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime import onednn_weights as room
from core.runtime import unquantized
from core.runtime.bench import WholeModel
from core.runtime.model import Model, Precision
from core.runtime.onednn_weights import BlockedEmbedding, BlockedLinear, reordered
from core.runtime.unquantized import orders
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}

needs_kernels = pytest.mark.skipif(
    not all(room.works(dtype) for dtype in TOLERANCE), reason="torch has no oneDNN kernels for this processor"
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 64])
def test_a_linear_multiplies_as_by_rows(dtype: torch.dtype, bias: bool, rows: int) -> None:
    weight, x = random(1024, 576, dtype=dtype), random(rows, 576, seed=1, dtype=dtype)
    added = random(1024, seed=2, dtype=dtype) if bias else None
    there = reordered(weight)
    assert there is not None
    linear = BlockedLinear(there, added)
    assert linear.nbytes == (1024 * 576 + 1024 * bias) * dtype.itemsize
    product, expected = linear(x), F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert (product.dtype, product.shape) == (dtype, (rows, 1024))
    assert rows == 0 or (product - expected).abs().max() < TOLERANCE[dtype]


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [2048, 4096, 5120, 2112])
def test_a_table_looks_up_and_multiplies_as_by_rows(dtype: torch.dtype, rows: int) -> None:
    weight, x = random(rows, 512, dtype=dtype), random(3, 512, seed=1, dtype=dtype)
    table = BlockedEmbedding.of(weight)
    assert table is not None
    assert table.nbytes == weight.nbytes
    ids = torch.tensor([rows - 1, 0, 7, 2047, 0, rows // 2])
    assert torch.equal(table.rows(ids), weight[ids])
    assert table.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 512)
    assert (table(x) - F.linear(x.double(), weight.double())).abs().max() < TOLERANCE[dtype]
    for outside in (rows, rows + 4096):
        with pytest.raises(IndexError):
            table.rows(torch.tensor([outside]))


@needs_kernels
def test_a_weight_that_would_be_padded_is_not_reordered() -> None:
    assert reordered(random(1000, 1001)) is None
    assert BlockedEmbedding.of(random(1000, 1001)) is None


def test_another_processor_has_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    room.works.cache_clear()
    assert not room.works(torch.float32)
    room.works.cache_clear()


@needs_kernels
@pytest.mark.parametrize("order", ["by rows", "by columns", "oneDNN's"])
def test_a_model_has_the_oracles_logits_in_any_order(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def only(weight: Tensor) -> list[Any]:
        found = orders(weight)
        return [each for each in found if each[0] == order] or found

    monkeypatch.setattr(unquantized, "orders", only)
    path = tiny_checkpoint(tmp_path, model_type="qwen2", layers=2, hidden_size=512, intermediate=1024, vocab=2048)
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(path)), plugins) as model:
        whole = WholeModel(model, precision, CPU)
    assert isinstance(whole._embed_and_head.head, BlockedEmbedding) is (order == "oneDNN's")  # type: ignore[attr-defined]
    tokens = list(range(5, 25))
    with torch.inference_mode():
        hidden = whole._stage.run(whole._embed(tokens), [Segment(1, 0, len(tokens), len(tokens))], outputs_only=False)
        found = whole._embed_and_head.logits(hidden)
        oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert (found - expected).abs().max() < 1e-3 * expected.std()
