"""A model without weights, by the plugins' own seams, and a head that decodes a token wherever one is wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from core.coordinator.batch import Entry, Outcome
from core.coordinator.head import Head
from core.coordinator.loaded_model import LoadedModel
from core.errors import CheckpointError, StageError
from core.interfaces.architecture import Architecture, EmbedAndHead, LayerStack, ModelSpec, TensorSpec, Weights
from core.interfaces.checkpoint import Checkpoint, FileInfo, Progress, TensorInfo
from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Quantizer
from core.protocol.fields import Tensor
from core.runtime.manifest import FileEntry, Manifest
from core.runtime.model import Model, Precision
from core.runtime.tokenizer import TextStream, Tokenizer
from core.testing.simulator import description

DTYPE = DType.FP16
VOCABULARY = 32_000
TOKEN = 0
"""All that it ever says."""
_FILE = "weights"
_NO_VALUES = "none"
"""As a dtype: the protocol knows none of that name, so it expects no bytes."""


def loaded_model(model: description.Model, quantizer: Quantizer) -> LoadedModel:
    """What a coordinator has loaded of `model`."""
    opened = Model(_Checkpoint(model), _Architecture(model))
    manifest = Manifest(opened, [FileEntry(_FILE, 1, "00" * 32, None)], {})
    precision = Precision(quantizer, DTYPE, DTYPE)
    return LoadedModel(opened, precision, _Tokenizer(), _Head(model.hidden_size), manifest, head_seconds=0.0)


class _Checkpoint(Checkpoint):
    """One tensor a layer, in a file that is on no machine."""

    config: Mapping[str, Any] = {}
    generation_config: Mapping[str, Any] = {}

    def __init__(self, model: description.Model) -> None:
        shapes = {_tensor(layer): _shape(model) for layer in range(model.layers)}
        self.tensors = {name: TensorInfo(shape, "fp16", 1, _FILE, 0) for name, shape in shapes.items()}

    def files(self) -> Mapping[str, FileInfo]:
        return {_FILE: FileInfo(1)}

    def path(self, file: str) -> Path | None:
        return None

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        raise CheckpointError("a simulated model has no weights")

    def read(self, name: str) -> torch.Tensor:
        raise CheckpointError("a simulated model has no weights")

    def tokenizer(self) -> Any:
        raise CheckpointError("a simulated model has no tokenizer")

    def close(self) -> None:
        return


class _Architecture(Architecture):
    name: ClassVar[str] = "simulated"
    model_types: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: description.Model) -> None:
        self._model = model

    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        model = self._model
        return ModelSpec(
            architecture=self.name,
            layers=model.layers,
            hidden_size=model.hidden_size,
            vocab_size=VOCABULARY,
            context_length=model.context,
            kv_width=round(model.kv_kb * 1000 / DTYPE.itemsize),
            tied_head=False,
            config=config,
        )

    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_tensor(layer), _shape(self._model)),)

    def non_layer_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return ()

    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        raise CheckpointError("a simulated model has no weights")

    def build_embed_and_head(self, spec: ModelSpec, weights: Weights) -> EmbedAndHead:
        raise CheckpointError("a simulated model has no weights")


def _tensor(layer: int) -> str:
    return f"layer {layer}"


def _shape(model: description.Model) -> tuple[int, ...]:
    return (round(model.layer_mb * 1e6 / DTYPE.itemsize),)


class _Text(TextStream):
    """Of tokens that say nothing."""

    def __init__(self) -> None:
        return

    @property
    def stop(self) -> str:
        return ""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Tokenizer(Tokenizer):
    def __init__(self) -> None:
        self.eos_ids = frozenset()
        self.vocab_size = VOCABULARY

    def text_stream(self, stop: Sequence[str] = (), *, special_tokens: bool = False) -> TextStream:
        return _Text()


class _Head(Head):
    """Its hidden states have a shape and no values."""

    def __init__(self, width: int) -> None:
        self._width = width

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return without_values(len(tokens), self._width)

    def check(self, hidden: Tensor, node: str) -> None:
        return

    def step(self, hidden: Tensor, entries: Sequence[Entry], node: str) -> list[Outcome]:
        if hidden.rows != sum(entry.outputs for entry in entries):
            raise StageError(f"{hidden.rows} rows of hidden states came back")
        return [_decoded(Outcome(entry)) for entry in entries]


def without_values(rows: int, width: int) -> Tensor:
    return Tensor(_NO_VALUES, rows, width, b"")


def _decoded(outcome: Outcome) -> Outcome:
    entry = outcome.entry
    if entry.outputs and entry.is_last:
        outcome.text, outcome.finish = entry.session.decoding.take(TOKEN)
        outcome.tokens.append(TOKEN)
    return outcome
