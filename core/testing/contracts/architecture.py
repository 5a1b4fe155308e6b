"""The contract of architectures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.parity import fixed_values
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.device import torch_dtype
from core.runtime.held_layers import Parts
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.oracle import TOLERANCE, Pipeline, oracle_logits, random_tokens, row_error, splits


class HeldLayersContract:
    """What `core.Architecture` promises of weights: layers are held once, whatever stages are built of them.

    A subclass named Test... has a fixture `checkpoint` that gives the folder of a small one of the family. Plugins that
    are installed read it, unless the subclass has a fixture `plugins` too.
    """

    ROWS = 5

    @pytest.fixture
    def checkpoint(self) -> Path:
        raise NotImplementedError("give a fixture `checkpoint`")

    @pytest.fixture
    def plugins(self) -> PluginHost:
        return PluginHost.installed()

    @pytest.fixture
    def model(self, checkpoint: Path, plugins: PluginHost) -> Iterator[Model]:
        with Model.open(Source(str(checkpoint)), plugins) as model:
            yield model

    @pytest.fixture
    def precision(self, plugins: PluginHost) -> Precision:
        return Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)

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


class ArchitectureContract(HeldLayersContract):
    """The contract of `core.Architecture`: beside what HeldLayersContract asks, the logits are those of transformers.

    A family that transformers does not know has its own `expected`.
    """

    PROMPT, STEPS = 20, 4

    def expected(self, checkpoint: Path, dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
        """The logits of `tokens`, computed in `dtype`: float32 [len(tokens), vocab_size]."""
        return oracle_logits(checkpoint, dtype, tokens)

    @pytest.mark.parametrize("dtype", list(DType))
    def test_every_split_has_the_expected_logits(
        self, checkpoint: Path, model: Model, precision: Precision, dtype: DType
    ) -> None:
        """Of a prompt, and of the tokens after it, one by one."""
        tokens = random_tokens(self.PROMPT + self.STEPS, seed=1)
        expected = self.expected(checkpoint, torch_dtype(dtype), tokens)
        bound = TOLERANCE[dtype] * float(expected.std())
        for ranges in splits(model.spec.layers):
            run = Pipeline.of(model, replace(precision, compute=dtype, wire=dtype), ranges)
            rows = [run(tokens[: self.PROMPT], 0)]
            rows += [run(tokens[position : position + 1], position) for position in range(self.PROMPT, len(tokens))]
            assert row_error(torch.cat(rows), expected, model, dtype) <= bound, f"{dtype}, split into {ranges}"

    def test_a_session_that_is_cut_back_goes_on_from_there(
        self, checkpoint: Path, model: Model, precision: Precision
    ) -> None:
        if not model.spec.can_truncate:
            pytest.skip("its ModelSpec says that it can't be")
        tokens = random_tokens(8, seed=2)
        expected = self.expected(checkpoint, torch.float32, tokens)
        run = Pipeline.of(model, precision, [range(model.spec.layers)])
        run([*tokens[:5], *reversed(tokens[:5])], 0)
        found = run(tokens[5:], 5)
        assert row_error(found, expected[5:], model, DType.FP32) <= TOLERANCE[DType.FP32] * float(expected.std())

    def test_sessions_in_one_batch_have_the_results_of_each(self, model: Model, precision: Precision) -> None:
        stage = self._stage(model, precision, range(model.spec.layers), None)[0]
        hidden = fixed_values(2 * self.ROWS, model.spec.hidden_size, seed=3)
        alone = [self._computed(stage, model, rows) for rows in (hidden[: self.ROWS], hidden[self.ROWS :])]
        segments = [Segment(session, 0, self.ROWS, self.ROWS) for session in (1, 2)]
        stage.caches.clear_all()
        together = stage.run(hidden, segments, outputs_only=False)
        torch.testing.assert_close(together, torch.cat(alone))
