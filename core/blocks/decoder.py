"""A decoder family: its tensors, its layers, and a range of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor

from core.blocks.attention import Attention, GatedAttention
from core.blocks.config import completed, size
from core.blocks.embed_and_head import DecoderEmbedAndHead
from core.blocks.gated_delta import GatedDelta
from core.blocks.latent_attention import LatentAttention
from core.blocks.mlp import GatedMLP
from core.blocks.moe import MixtureOfExperts
from core.blocks.rope import RotaryEmbedding, Rotation, context_length
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import (
    Architecture,
    Batch,
    CacheSize,
    EmbedAndHead,
    LayerStack,
    ModelSpec,
    TensorSpec,
    Weights,
)
from core.interfaces.checkpoint import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """`fused_experts` says that the checkpoint has one tensor of all experts where the family has one of each."""

    fused_experts: bool = False


HEAD = "lm_head.weight"


class DecoderArchitecture(Architecture):
    """Decoder with grouped-query attention, rotary embeddings, a gated MLP or a mixture of experts, and norms before or
    around both."""

    tied_by_default: ClassVar[bool] = False
    """Whether a config that does not speak of `tie_word_embeddings` means that the head is the embedding."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What a config leaves out because transformers' class of the family has it."""

    @abstractmethod
    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        """Raises ConfigError where the config asks for something that this family does not compute."""

    def layer_class(self, shape: DecoderShape) -> type[DecoderLayer]:
        """What computes a layer. A family whose layers are of another kind gives a class of its own."""
        return PostNormLayer if shape.post_norms else DecoderLayer

    def rotaries(self, config: Mapping[str, Any], head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        """Of the layers that see everything, and of those with a window. Raises ConfigError as `shape` does."""
        rotary = RotaryEmbedding.from_config(config, head_dim)
        return rotary, rotary

    def read_model(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> DecoderSpec:
        """A head of the checkpoint's own is the head, also if the config ties it to the embedding."""
        spec = self.read_config(config)
        fused = any(name.endswith(".experts.down_proj") for name in tensors)
        return replace(spec, fused_experts=fused, tied_head=spec.tied_head and HEAD not in tensors)

    def read_config(self, config: Mapping[str, Any]) -> DecoderSpec:
        config = completed(config, self.defaults)
        shape = self.shape(config)
        self.rotaries(config, shape.head_dim)
        return DecoderSpec(
            architecture=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden_size=shape.hidden_size,
            vocab_size=size(config, "vocab_size"),
            context_length=context_length(config),
            kv_width=shape.kv_width,
            tied_head=bool(config.get("tie_word_embeddings", self.tied_by_default)),
            config=config,
            can_truncate=shape.delta is None,
            snapshots=shape.delta is not None,
        )

    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        shape = self._shape_of(spec)
        return self.layer_class(shape).tensors(shape, layer)

    def layer_cache(self, spec: ModelSpec, layer: int) -> CacheSize:
        shape = self._shape_of(spec)
        delta = shape.delta_of(layer)
        if delta is not None:
            return GatedDelta.cache(delta)
        return CacheSize(shape.kv_width, window=shape.window(layer), token_rows=shape.kv_rows)

    def non_layer_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        table = (spec.vocab_size, spec.hidden_size)
        head = () if spec.tied_head else (TensorSpec(HEAD, table, packed=True),)
        return (
            TensorSpec("model.embed_tokens.weight", table, embedding=True),
            TensorSpec("model.norm.weight", (spec.hidden_size,)),
            *head,
        )

    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        shape = self._shape_of(spec)
        full, sliding = self.rotaries(spec.config, shape.head_dim)
        kind = self.layer_class(shape)
        built = [kind(shape, layer, weights) for layer in layers]
        alike = shape.mixture is None and shape.delta is None
        stack = PiecewiseDecoderStack if alike else DecoderStack
        return stack(built, [full if shape.window(layer) is None else sliding for layer in layers])

    def build_embed_and_head(self, spec: ModelSpec, weights: Weights) -> EmbedAndHead:
        return DecoderEmbedAndHead(spec, self.shape(spec.config), weights)

    def _shape_of(self, spec: ModelSpec) -> DecoderShape:
        """With its tensors as the checkpoint has them."""
        shape = self.shape(spec.config)
        if shape.mixture is None or not cast("DecoderSpec", spec).fused_experts:
            return shape
        return replace(shape, mixture=shape.mixture.as_fused())


class DecoderLayer:
    """Attention, then an MLP; each reads a normalized residual stream and adds to it.

    A subclass has norms of other `NORMS`, names more `tensors` and reads them in its `__init__`, and computes otherwise
    in `before` and `after`.
    """

    NORMS: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    @classmethod
    def tensors(cls, shape: DecoderShape, layer: int) -> tuple[TensorSpec, ...]:
        norms = (TensorSpec(f"model.layers.{layer}.{name}.weight", (shape.hidden_size,)) for name in cls.NORMS)
        return (*norms, *_attention_tensors(shape, layer), *_mlp_tensors(shape, layer))

    def __init__(self, shape: DecoderShape, layer: int, weights: Weights) -> None:
        self.norms = [shape.norm(weights.tensor(f"model.layers.{layer}.{name}.weight")) for name in self.NORMS]
        self.attention = _attention(shape, layer, weights)
        self.mlp = _mlp(shape, layer, weights)

    def __call__(self, hidden: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        return self.after(hidden, self.attend(batch, *self.before(hidden, rotation)))

    def before(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.norms[0](hidden), rotation)

    def attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.attend(batch, q, k, v)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.attention.out(attended)
        return hidden.add_(self.mlp(self.norms[1](hidden)))


class PostNormLayer(DecoderLayer):
    """A DecoderLayer that normalizes what it adds to the residual stream, too."""

    NORMS: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        _, after_attention, before_mlp, after_mlp = self.norms
        hidden = hidden + after_attention(self.attention.out(attended))
        return hidden.add_(after_mlp(self.mlp(before_mlp(hidden))))


class DecoderStack:
    """A layer range of a DecoderArchitecture, each layer with its rotary embedding."""

    def __init__(self, layers: Sequence[DecoderLayer], rotaries: Sequence[RotaryEmbedding]) -> None:
        self.layers = layers
        self.rotaries = rotaries
        self._distinct = tuple(dict.fromkeys(rotaries))
        self.dtype = layers[0].norms[0].dtype

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        for layer, rotation in zip(self.layers, self.rotations(batch.positions), strict=True):
            hidden = layer(hidden, rotation, batch)
        return hidden

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Each layer's rotation, computed once for all that share it."""
        rotations = {rotary: rotary(positions, self.dtype) for rotary in self._distinct}
        return [rotations[rotary] for rotary in self.rotaries]


class PiecewiseDecoderStack(DecoderStack):
    """One that can be compiled: its layers are alike, and no tensor's values say what is computed."""

    def encode(self, positions: Tensor) -> list[Rotation]:
        return self.rotations(positions)


def _attention(shape: DecoderShape, layer: int, weights: Weights) -> Attention | LatentAttention | GatedDelta:
    delta = shape.delta_of(layer)
    if delta is not None:
        return GatedDelta(shape, delta, layer, weights)
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, layer, weights)
    return (GatedAttention if shape.gated_attention else Attention)(shape, layer, weights)


def _attention_tensors(shape: DecoderShape, layer: int) -> tuple[TensorSpec, ...]:
    delta = shape.delta_of(layer)
    if delta is not None:
        return GatedDelta.tensors(shape, delta, layer)
    if shape.latent is not None:
        return LatentAttention.tensors(shape, shape.latent, layer)
    return Attention.tensors(shape, layer)


def _mlp(shape: DecoderShape, layer: int, weights: Weights) -> GatedMLP | MixtureOfExperts:
    mixture = shape.mixture_of(layer)
    if mixture is not None:
        return MixtureOfExperts(shape, mixture, layer, weights)
    return GatedMLP(shape, f"model.layers.{layer}.mlp", weights)


def _mlp_tensors(shape: DecoderShape, layer: int) -> tuple[TensorSpec, ...]:
    mixture = shape.mixture_of(layer)
    if mixture is not None:
        return MixtureOfExperts.tensors(shape, mixture, layer)
    return GatedMLP.tensors(shape, f"model.layers.{layer}.mlp", shape.intermediate_size)
