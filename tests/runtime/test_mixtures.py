"""Mixtures of experts in a stage: sessions share the products of a batch, and what can't be had is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from core.runtime.layer_cache import capacity
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


@pytest.fixture
def latent_model(tmp_path: Path) -> Iterator[Model]:
    path = tiny_checkpoint(tmp_path, model_type="deepseek_v3", layers=LAYERS, hidden_size=WIDTH)
    with Model.open(Source(str(path)), PLUGINS) as model:
        yield model


def test_a_cache_of_latents_is_as_small_as_planned(latent_model: Model) -> None:
    precision = Precision(PLUGINS.quantizers.get("fp16"), DType.BF16, DType.BF16)
    stage, _ = latent_model.load_stage(range(LAYERS), precision, torch.device("cpu"))
    stage.run(torch.randn(300, WIDTH), [Segment(1, 0, 300, 1)], outputs_only=True)
    assert latent_model.spec.kv_width == 32 + 8
    assert stage.caches.nbytes == latent_model.session_cost(range(LAYERS), precision)(capacity(300))


def test_a_session_goes_on_from_anothers_latents(latent_model: Model) -> None:
    precision = Precision(PLUGINS.quantizers.get("fp16"), DType.FP32, DType.FP32)
    stage, _ = latent_model.load_stage(range(LAYERS), precision, torch.device("cpu"))
    hidden = torch.randn(60, WIDTH)
    stage.run(hidden, [Segment(1, 0, 60, 60)], outputs_only=False)
    stage.caches.copy(1, 2, 50)
    again = stage.run(hidden[50:], [Segment(2, 50, 10, 10)], outputs_only=False)
    torch.testing.assert_close(again, stage.run(hidden[50:], [Segment(1, 50, 10, 10)], outputs_only=False))


@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (20, 1), (20, 9)])
def test_a_few_rows_attend_to_latents_as_many_do_to_what_is_made_of_them(
    latent_model: Model, start: int, rows: int
) -> None:
    precision = Precision(PLUGINS.quantizers.get("fp16"), DType.FP32, DType.FP32)
    stack: Any = latent_model.load_layers(range(1), precision, torch.device("cpu"))
    attention = stack.layers[0].attention
    q, cached = torch.randn(rows, 4, 24), torch.randn(1, start + rows, 40)
    torch.testing.assert_close(attention._absorbed(q, cached, start), attention._expanded(q, cached, start))
