"""What comes with core keeps the contracts that its authors' plugins are held to."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_plugin_gguf import tokenizer as gguf_tokenizer
from core_plugin_gguf.checkpoint import GgufFormat
from core_plugin_quant.fp16 import FP16
from core_plugin_quant.int4 import Int4
from core_plugin_quant.int8 import Int8
from core_plugin_safetensors.checkpoint import SafetensorsFormat

from core import CheckpointFormat, Quantizer
from core.testing.checkpoints import tiny_checkpoint, write_gguf
from core.testing.contracts import ArchitectureContract, CheckpointFormatContract, QuantizerContract


class TestFp16(QuantizerContract):
    ERROR = 0.01

    @pytest.fixture
    def quantizer(self) -> Quantizer:
        return FP16()


class TestInt8(QuantizerContract):
    ERROR = 0.02

    @pytest.fixture
    def quantizer(self) -> Quantizer:
        return Int8()


class TestInt4(QuantizerContract):
    @pytest.fixture
    def quantizer(self) -> Quantizer:
        return Int4()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=3)


@pytest.fixture(scope="module")
def tiny_gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


class TestSafetensors(CheckpointFormatContract):
    @pytest.fixture
    def checkpoint_format(self) -> CheckpointFormat:
        return SafetensorsFormat()

    @pytest.fixture
    def model(self, tiny: Path) -> Path:
        return tiny


class TestGguf(CheckpointFormatContract):
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gguf_tokenizer, "user_cache_path", lambda _name: tmp_path / "cache")

    @pytest.fixture
    def checkpoint_format(self) -> CheckpointFormat:
        return GgufFormat()

    @pytest.fixture
    def model(self, tiny_gguf: Path) -> Path:
        return tiny_gguf


class TestLlama(ArchitectureContract):
    @pytest.fixture
    def checkpoint(self, tiny: Path) -> Path:
        return tiny
