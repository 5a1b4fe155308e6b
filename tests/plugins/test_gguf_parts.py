"""GGUF files that are split, and the blocks of 256 values that large models come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from core_plugin_gguf import tokenizer as gguf_tokenizer
from core_plugin_gguf.checkpoint import GgufFormat

from core import Checkpoint, CheckpointError, Source
from core.testing.checkpoints import tiny_checkpoint, write_gguf

TEXT = "A token enters the first layer, don't it?\n"


@pytest.fixture(autouse=True)
def no_cache_but_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "user_cache_path", lambda _name: tmp_path / "cache")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "original", layers=2, tied=False)


def opened(path: Path) -> Checkpoint:
    return GgufFormat().open(Source(str(path)))


def split(original: Path) -> Path:
    """The first of three parts."""
    return write_gguf(original, original.with_name("tiny.gguf"), "Q8_0", part_tensors=8)


@pytest.mark.parametrize("number", [1, 3])
def test_a_split_file_is_what_the_whole_one_is(original: Path, number: int) -> None:
    expected = opened(write_gguf(original, original.with_name("whole.gguf"), "Q8_0"))
    checkpoint = opened(split(original).with_name(f"tiny-0000{number}-of-00003.gguf"))
    assert checkpoint.config == expected.config
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert {info.file for info in checkpoint.tensors.values()} == {f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)}
    checkpoint.fetch(checkpoint.tensors)
    for name in expected.tensors:
        assert torch.equal(checkpoint.read(name), expected.read(name))
    assert checkpoint.tokenizer().encode(TEXT) == expected.tokenizer().encode(TEXT)
    checkpoint.close()


def test_a_part_that_is_missing_is_named(original: Path) -> None:
    first = split(original)
    first.with_name("tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf can't be read"):
        opened(first)


@pytest.mark.parametrize("name", ["renamed.gguf", "tiny-00001-of-00002.gguf", "tiny-00001-of-00000.gguf"])
def test_a_part_under_another_name_is_refused(original: Path, name: str) -> None:
    first = split(original)
    with pytest.raises(CheckpointError, match=f"{name} says that it is one of 3 parts"):
        opened(first.rename(first.with_name(name)))


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_blocks_of_256_are_what_the_gguf_package_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """The package reads these but writes none, so that blocks of any values stand in for a matrix."""
    kind = gguf.GGMLQuantizationType[quant]
    monkeypatch.setattr(gguf.quants, "quantize", stand_in)
    original = tiny_checkpoint(tmp_path / "original", model_type="qwen2", layers=1, hidden_size=256, intermediate=512)
    checkpoint = opened(write_gguf(original, tmp_path / "tiny.gguf", quant))
    matrices = {name: info.shape for name, info in checkpoint.tensors.items() if len(info.shape) > 1}
    assert len(matrices) == 8
    for name, shape in matrices.items():
        read = checkpoint.read(name)
        assert torch.equal(read, torch.from_numpy(gguf.quants.dequantize(blocks(kind, shape), kind)))
        assert torch.isfinite(read).all()
        assert read.std() > 0


def stand_in(values: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    return values if values.ndim == 1 else blocks(kind, values.shape)


def blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Packed rows. No byte is over 0x3F: wherever the scales lie, they are finite."""
    block, nbytes = gguf.constants.GGML_QUANT_SIZES[kind]
    row = shape[-1] // block * nbytes
    return np.random.default_rng(shape[0]).integers(0, 0x40, (shape[0], row), dtype=np.uint8)
