"""The contract of architectures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.parity import fixed_values
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.held_layers import Parts
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage


class ArchitectureContract:
    """The contract of `core.Architecture`. A subclass named Test... has a fixture `checkpoint` that gives the folder of
    a small one of the family, which an installed plugin reads."""

    ROWS = 5

    @pytest.fixture
    def checkpoint(self) -> Path:
        raise NotImplementedError("give a fixture `checkpoint`")

    @pytest.fixture
    def model(self, checkpoint: Path) -> Iterator[Model]:
        with Model.open(Source(str(checkpoint)), PluginHost.installed()) as model:
            yield model

    @pytest.fixture
    def precision(self) -> Precision:
        return Precision(PluginHost.installed().quantizers.get("fp16"), DType.FP32, DType.FP32)

    def test_held_layers_are_read_once_whatever_is_built_of_them(self, model: Model, precision: Precision) -> None:
        layers, parts = range(model.spec.layers), Parts()
        _, read = self._stage(model, precision, layers, parts)
        assert read == sum(model.checkpoint.tensors[name].nbytes for name in set(model.layer_tensor_names(layers)))
        for part in (layers, layers[:1], layers[1:]):
            assert self._stage(model, precision, part, parts)[1] == 0

    def test_stages_of_the_same_held_layers_compute_the_same_in_turn(self, model: Model, precision: Precision) -> None:
        """So nothing that is held is changed in place, neither by building nor by computing."""
        layers, parts = range(model.spec.layers), Parts()
        alone = self._computed(self._stage(model, precision, layers, None)[0], model)
        first, second = (self._stage(model, precision, layers, parts)[0] for _ in range(2))
        for stage in (first, second, first, self._stage(model, precision, layers, parts)[0]):
            torch.testing.assert_close(self._computed(stage, model), alone, rtol=0, atol=0)

    def test_stages_of_held_layers_have_the_results_of_the_whole(self, model: Model, precision: Precision) -> None:
        layers, parts = range(model.spec.layers), Parts()
        expected = self._computed(self._stage(model, precision, layers, parts)[0], model)
        halves = [self._stage(model, precision, part, parts)[0] for part in (layers[:1], layers[1:])]
        torch.testing.assert_close(self._computed(halves[1], model, self._computed(halves[0], model)), expected)

    def _stage(self, model: Model, precision: Precision, layers: range, parts: Parts | None) -> tuple[Stage, int]:
        return model.load_stage(layers, precision, torch.device("cpu"), parts=parts)

    def _computed(self, stage: Stage, model: Model, hidden: Tensor | None = None) -> Tensor:
        """Of a prompt, in a session of its own."""
        if hidden is None:
            hidden = fixed_values(self.ROWS, model.spec.hidden_size, seed=1)
        stage.caches.clear_all()
        return stage.run(hidden, [Segment(1, 0, self.ROWS, self.ROWS)], outputs_only=False)
