"""A model as one machine sees it: an opened checkpoint, its family, and how its weights are to be held."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from core.errors import CheckpointError, ConfigError
from core.interfaces.architecture import Architecture, EmbedAndHead, LayerStack, ModelSpec, TensorSpec
from core.interfaces.checkpoint import Checkpoint, Progress, Source, TensorInfo
from core.interfaces.dtypes import DType, KVDType
from core.interfaces.quantizer import Quantizer
from core.plugins import PluginHost
from core.runtime.cuts import Cuts
from core.runtime.device import refuse_dtype, torch_dtype
from core.runtime.held_layers import Parts
from core.runtime.memory import large_blocks_returned
from core.runtime.sampling_params import advised
from core.runtime.session_cost import SessionCost
from core.runtime.stage import Stage
from core.runtime.unquantized import Plain
from core.runtime.weights import StageWeights, check_tensors, embedding_quantizer

Storage = Mapping[str, TensorInfo]
"""Tensors by their names, as the checkpoint stores them."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are packed, what stages compute in, what hidden states travel in, and what `kv` caches hold.

    `head` packs embedding and head if it isn't `quantizer` that does; `keep_head` leaves them in the compute dtype,
    whatever the quantizers. `quality` says in a short phrase what all of this costs in quality, if it is known.
    """

    quantizer: Quantizer
    compute: DType
    wire: DType
    keep_head: bool = False
    head: Quantizer | None = None
    quality: str = field(default="", compare=False)
    kv: KVDType = KVDType.AUTO

    @property
    def of_embed_and_head(self) -> Precision:
        return replace(self, quantizer=Plain() if self.keep_head else self.head or self.quantizer)

    @property
    def residual(self) -> torch.dtype:
        return torch.promote_types(torch_dtype(self.compute), torch_dtype(self.wire))


def choose_wire(wire: str, compute: DType, checkpoint: Checkpoint) -> DType:
    """`--wire-dtype`: what was asked for, or for "auto" the compute dtype.

    fp16 ends at 65,504, and many models' residual streams go beyond it. So "auto" takes fp16 only for a checkpoint
    that runs in fp16, and fp32 otherwise.
    """
    if wire != "auto":
        return DType(wire)
    if compute is not DType.FP16:
        return compute
    return DType.FP16 if runs_in_fp16(checkpoint) else DType.FP32


def runs_in_fp16(checkpoint: Checkpoint) -> bool:
    """Whether its weights were published in fp16, in which their authors ran it then."""
    return (checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")) in ("float16", "fp16")


class Model:
    """Sizes are known once it is open; weights are read by `load_stage` and `load_embed_and_head` alone."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.sampling_defaults = advised(checkpoint.generation_config)
        try:
            self.spec: ModelSpec = architecture.read_model(checkpoint.config, checkpoint.tensors)
            check_tensors(checkpoint, self._non_layer_specs())
            for layer in range(self.spec.layers):
                check_tensors(checkpoint, self._layer_specs(layer))
            self.layer_caches = [architecture.layer_cache(self.spec, layer) for layer in range(self.spec.layers)]
        # A config may say anything where something else is expected.
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                "the model's config does not read",
                f"{type(error).__name__}: {error}",
                f"config.json is damaged, or of no {architecture.name} model, or that plugin is wrong",
            ) from error

    @classmethod
    @contextmanager
    def open(cls, source: Source, plugins: PluginHost) -> Iterator[Model]:
        """Raises CheckpointError: not a model, an unknown family, a tensor missing or misshapen; ConfigError for a
        revision of what has none."""
        checkpoint = plugins.open_checkpoint(source)
        try:
            yield cls._of(checkpoint, plugins)
        finally:
            checkpoint.close()

    @classmethod
    def _of(cls, checkpoint: Checkpoint, plugins: PluginHost) -> Self:
        """An architecture refuses a config; to whoever wants the model, that is a model which can't be read."""
        try:
            return cls(checkpoint, plugins.architecture_of(checkpoint.config))
        except ConfigError as error:
            raise CheckpointError(error.title, error.message, error.hint) from error

    def layer_bytes(self, layer: int, precision: Precision) -> int:
        """What one layer's weights hold on a node."""
        return held_bytes(self._layer_specs(layer), precision, self.checkpoint.tensors)

    def stored_bytes(self, layers: range) -> int:
        """What the layers' tensors take in the checkpoint's files."""
        return sum(self.checkpoint.tensors[spec.name].nbytes for spec in self._stage_specs(layers))

    def session_cost(self, layers: range, precision: Precision) -> SessionCost:
        """What a session's caches of `layers` take."""
        return SessionCost(self.layer_caches[layers.start : layers.stop], precision.compute, precision.kv)

    @property
    def cuts(self) -> Cuts:
        windows = frozenset(size.window for size in self.layer_caches)
        slides = self.spec.can_truncate and windows != {None}
        return Cuts(self.spec.can_truncate, self.spec.snapshots or slides, windows)

    def embed_and_head_bytes(self, precision: Precision) -> int:
        """What embedding, norm and head hold on the coordinator."""
        return held_bytes(self._non_layer_specs(), precision.of_embed_and_head, self.checkpoint.tensors)

    def largest_linear(self) -> tuple[int, int] | None:
        """The shape (out_features, in_features) of the first layer's largest weight that is packed, if there is any."""
        return max(self._linear_shapes(), key=math.prod, default=None)

    def smallest_linear(self) -> tuple[int, int] | None:
        """Likewise the smallest one's."""
        return min(self._linear_shapes(), key=math.prod, default=None)

    def layer_bits(self) -> int | None:
        """Of a value of most of the layers' weights, as the checkpoint stores them; None where it doesn't say."""
        return _most_bits(self.layer_storage())

    def embed_and_head_bits(self) -> int | None:
        """Likewise of embedding and head."""
        return _most_bits(self.embed_and_head_storage())

    def layer_storage(self) -> Storage:
        """How the layers' weights that a quantizer packs are stored."""
        return self._storage(self._stage_specs(range(self.spec.layers)))

    def embed_and_head_storage(self) -> Storage:
        """Likewise of embedding and head."""
        return self._storage(self._non_layer_specs())

    def layer_tensor_names(self, layers: Sequence[int]) -> list[str]:
        return [spec.name for layer in layers for spec in self._layer_specs(layer)]

    def fetch_stage(self, layers: Sequence[int], progress: Progress | None = None) -> None:
        """Brings the files that hold `layers` to this machine."""
        self.checkpoint.fetch(self.layer_tensor_names(layers), progress)

    def embed_and_head_tensor_names(self) -> list[str]:
        return [spec.name for spec in self._non_layer_specs()]

    def fetch_embed_and_head(self, progress: Progress | None = None) -> None:
        self.checkpoint.fetch(self.embed_and_head_tensor_names(), progress)

    def load_stage(
        self,
        layers: range,
        precision: Precision,
        device: torch.device,
        progress: Progress | None = None,
        seen: Callable[[str], None] | None = None,
        parts: Parts | None = None,
    ) -> tuple[Stage, int]:
        """The stage, and the bytes that were read for it: as of `load_layers`."""
        stack, weights = self._load_layers(layers, precision, device, progress, seen, parts)
        stage = Stage(stack, layers, device, precision.residual, nbytes=weights.nbytes, kv=precision.kv)
        return stage, weights.read_bytes

    def load_layers(
        self,
        layers: range,
        precision: Precision,
        device: torch.device,
        progress: Progress | None = None,
        seen: Callable[[str], None] | None = None,
        parts: Parts | None = None,
    ) -> LayerStack:
        """What a stage of `layers` computes with, without the caches of sessions.

        `parts` are taken as they are; the rest is read, from files that have been fetched, and added to them. `seen`
        is told each tensor that was read.
        """
        return self._load_layers(layers, precision, device, progress, seen, parts)[0]

    def _load_layers(
        self,
        layers: range,
        precision: Precision,
        device: torch.device,
        progress: Progress | None,
        seen: Callable[[str], None] | None,
        parts: Parts | None,
    ) -> tuple[LayerStack, StageWeights]:
        """A tensor of a part is not among those that can be read: what is held was proven, and may differ by now."""
        held = {name for part in (parts or {}).values() for name in part.names}
        specs = [spec for spec in self._stage_specs(layers) if spec.name not in held]
        weights = self._weights(specs, precision, device, progress, seen, parts)
        with large_blocks_returned():
            return self.architecture.build_layers(self.spec, layers, weights), weights

    def load_embed_and_head(
        self,
        precision: Precision,
        device: torch.device,
        progress: Progress | None = None,
        seen: Callable[[str], None] | None = None,
    ) -> EmbedAndHead:
        weights = self._weights(self._non_layer_specs(), precision.of_embed_and_head, device, progress, seen)
        with large_blocks_returned():
            return self.architecture.build_embed_and_head(self.spec, weights)

    def _weights(
        self,
        specs: list[TensorSpec],
        precision: Precision,
        device: torch.device,
        progress: Progress | None,
        seen: Callable[[str], None] | None = None,
        parts: Parts | None = None,
    ) -> StageWeights:
        refused = refuse_dtype(device, precision.compute)
        if refused:
            raise ConfigError(f"--dtype {precision.compute} can't be had", refused)
        dtype = torch_dtype(precision.compute)
        return StageWeights(self.checkpoint, specs, precision.quantizer, dtype, device, progress, seen, parts)

    def _storage(self, specs: Sequence[TensorSpec]) -> Storage:
        return {spec.name: self.checkpoint.tensors[spec.name] for spec in specs if spec.packed or spec.embedding}

    def _linear_shapes(self) -> list[tuple[int, int]]:
        shapes = [spec.weight_shape for spec in self._layer_specs(0) if spec.packed]
        return [(rows, columns) for *_, rows, columns in shapes]

    def _layer_specs(self, layer: int) -> list[TensorSpec]:
        return list(self.architecture.layer_tensors(self.spec, layer))

    def _stage_specs(self, layers: range) -> list[TensorSpec]:
        return [spec for layer in layers for spec in self._layer_specs(layer)]

    def _non_layer_specs(self) -> list[TensorSpec]:
        return list(self.architecture.non_layer_tensors(self.spec))


def _most_bits(storage: Storage) -> int | None:
    values = Counter[int | None]()
    for info in storage.values():
        values[info.bits] += math.prod(info.shape)
    return max(values, key=values.__getitem__, default=None)


def held_bytes(specs: Sequence[TensorSpec], precision: Precision, tensors: Mapping[str, TensorInfo]) -> int:
    """What tensors take where they are held. `tensors` are the checkpoint's."""
    held = 0
    for spec in specs:
        if spec.packed or spec.embedding:
            *experts, rows, columns = spec.weight_shape
            quantizer = embedding_quantizer(precision.quantizer) if spec.embedding else precision.quantizer
            form = tensors[spec.name].form
            if form is not None and quantizer.keeps(form):
                each = quantizer.kept_bytes((rows, columns), form, precision.compute)
            else:
                each = quantizer.packed_bytes((rows, columns), precision.compute)
            held += math.prod(experts) * each
        else:
            size = (DType.FP32 if spec.fp32 else precision.compute).itemsize
            for extent in spec.shape:
                size *= extent
            held += size
    return held
