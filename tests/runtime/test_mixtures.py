"""Mixtures of experts in a stage: sessions share the products of a batch, and what can't be had is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from core import DType, Source
from core.errors import ConfigError
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.compiled import Opaque, compile_stage
from core.runtime.experts import PackedExperts
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.checkpoints import tiny_checkpoint

LAYERS, WIDTH = 3, 64
PLUGINS = PluginHost.installed()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    path = tiny_checkpoint(tmp_path, model_type="qwen3_moe", layers=LAYERS, hidden_size=WIDTH)
    with Model.open(Source(str(path)), PLUGINS) as model:
        precision = Precision(Opaque(PLUGINS.quantizers.get("int8")), DType.FP32, DType.FP32)
        return model.load_stage(range(LAYERS), precision, torch.device("cpu"))[0]


def test_sessions_in_one_batch_share_the_products(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        computed = getattr(PackedExperts, name)

        def call(self: PackedExperts, *arguments: Any) -> torch.Tensor:
            calls[name] += 1
            result: torch.Tensor = computed(self, *arguments)
            return result

        monkeypatch.setattr(PackedExperts, name, call)

    counted("__call__")
    counted("each")
    stage.run(torch.randn(1, WIDTH), [Segment(1, 0, 1, 1)], outputs_only=False)
    assert calls == {"each": 2 * LAYERS}
    calls.clear()
    stage.run(torch.randn(4, WIDTH), [Segment(session, 0, 1, 1) for session in range(4)], outputs_only=False)
    assert calls == {"__call__": 2 * LAYERS}


def test_layers_whose_work_depends_on_their_values_are_not_compiled(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="layers are not in pieces that could be compiled"):
        compile_stage(stage, WIDTH, torch.float32)
