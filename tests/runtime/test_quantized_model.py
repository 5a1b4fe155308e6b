"""A quantized model, split in any way, against transformers on the dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from core import DType, Quantizer, Source
from core.plugins import PluginHost
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
PLUGINS = PluginHost.installed()
PROMPT, DECODE = 40, 8
TOLERANCE = {DType.FP32: 1e-4, DType.FP16: 0.06, DType.BF16: 0.4}
"""In standard deviations of the logits, as for weights that are not quantized."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tied": True},
    "qwen2-untied": {"model_type": "qwen2", "tied": False},
    "llama-odd": {"model_type": "llama", "tied": True, "vocab": 323, "hidden_size": 48, "intermediate": 80},
}
SPLITS = [(range(0, 3),), (range(0, 1), range(1, 3)), (range(0, 1), range(1, 2), range(2, 3))]


class Piece(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), layers=3, **VARIANTS[request.param])


@pytest.fixture
def model(checkpoint: Path) -> Iterator[Model]:
    with Model.open(Source(str(checkpoint)), PLUGINS) as model:
        yield model


def tokens(count: int) -> list[int]:
    ids: list[int] = torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    return ids


def logits(model: Model, precision: Precision, layers: tuple[range, ...]) -> Tensor:
    """Of a prefill and of decode steps after it, one token each."""
    outer = model.load_embed_and_head(precision, CPU)
    stages = [model.load_stage(part, precision, CPU)[0] for part in layers]
    ids = tokens(PROMPT + DECODE)
    pieces = [(0, ids[:PROMPT])] + [(at, ids[at : at + 1]) for at in range(PROMPT, PROMPT + DECODE)]
    found = []
    with torch.inference_mode():
        for position, piece in pieces:
            hidden = outer.embed(torch.tensor(piece))
            for stage in stages:
                hidden = stage.run(hidden, [Piece(1, position, len(piece), len(piece))], outputs_only=False)
            found.append(outer.logits(hidden))
    return torch.cat(found)


def oracle(path: Path, quantizer: Quantizer, dtype: torch.dtype, keep_head: bool) -> Tensor:
    """transformers' logits, with each weight that core packs replaced by what packing makes of it."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    kept = {id(oracle.get_input_embeddings().weight), id(oracle.get_output_embeddings().weight)} if keep_head else set()
    with torch.inference_mode():
        for parameter in oracle.parameters():
            if parameter.ndim == 2 and id(parameter) not in kept:
                packed = quantizer.pack_embedding(parameter.detach().clone(), dtype=dtype, device=CPU)
                parameter.copy_(packed.rows(torch.arange(len(parameter))))
        found: Tensor = oracle.to(dtype)(torch.tensor([tokens(PROMPT + DECODE)])).logits[0].float()
    return found


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("dtype", list(DType))
def test_every_split_has_the_logits_of_the_dequantised_weights(
    model: Model, checkpoint: Path, quant: str, dtype: DType
) -> None:
    quantizer = PLUGINS.quantizers.get(quant)
    precision = Precision(quantizer, dtype, dtype)
    expected = oracle(checkpoint, quantizer, torch_dtype(dtype), keep_head=False)
    plain = oracle(checkpoint, PLUGINS.quantizers.get("fp16"), torch_dtype(dtype), keep_head=False)
    whole = logits(model, precision, SPLITS[0])
    assert (whole - expected).abs().max() < TOLERANCE[dtype] * expected.std()
    assert (plain - expected).abs().max() > TOLERANCE[DType.FP32] * expected.std(), "quantizing changed nothing"
    for split in SPLITS[1:]:
        assert torch.equal(logits(model, precision, split), whole), split


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_keep_head_leaves_embedding_and_head_as_they_are(model: Model, checkpoint: Path, quant: str) -> None:
    quantizer = PLUGINS.quantizers.get(quant)
    kept, packed = (Precision(quantizer, DType.FP32, DType.FP32, keep_head=keep) for keep in (True, False))
    expected = oracle(checkpoint, quantizer, torch.float32, keep_head=True)
    assert (logits(model, kept, SPLITS[0]) - expected).abs().max() < TOLERANCE[DType.FP32] * expected.std()
    assert model.layer_bytes(0, kept) == model.layer_bytes(0, packed)
    assert model.embed_and_head_bytes(kept) == model.embed_and_head_bytes(
        Precision(PLUGINS.quantizers.get("fp16"), DType.FP32, DType.FP32)
    )
    assert model.embed_and_head_bytes(packed) < model.embed_and_head_bytes(kept) / 2


def test_an_embedding_stays_in_the_compute_dtype_where_rows_cant_be_looked_up(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = PLUGINS.quantizers.get("int8")
    monkeypatch.setattr(type(quantizer), "packs_embeddings", False)
    precision = Precision(quantizer, DType.FP16, DType.FP16)
    outer: Any = model.load_embed_and_head(precision, CPU)
    assert outer.embedding.nbytes == model.spec.vocab_size * model.spec.hidden_size * DType.FP16.itemsize
    head = 0 if model.spec.tied_head else outer.head.nbytes
    assert model.embed_and_head_bytes(precision) == outer.embedding.nbytes + outer.norm.weight.nbytes + head


def test_a_tied_embedding_is_held_once(model: Model) -> None:
    outer: Any = model.load_embed_and_head(Precision(PLUGINS.quantizers.get("int4"), DType.BF16, DType.BF16), CPU)
    assert (outer.head is outer.embedding) is model.spec.tied_head
