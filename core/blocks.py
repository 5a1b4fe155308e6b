"""Building blocks for the authors of architectures: decoder families that differ in a config, not in their shape.

A family subclasses `DecoderArchitecture` and says in `shape` how its config reads. Attribute and tensor names are
those of Hugging Face checkpoints. The residual stream keeps the dtype that it came in with; norms bring it to the
compute dtype, which the weights have.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigError
from core.interfaces.architecture import Architecture, Batch, Ends, LayerStack, ModelSpec, TensorSpec, Weights
from core.runtime.device import matmul_dtype


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """How one family's config reads: sizes in values, not bytes."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


class DecoderArchitecture(Architecture):
    """Pre-norm decoder with grouped-query attention, rotary embeddings and a gated MLP (as in Llama and Qwen2)."""

    @abstractmethod
    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        """Raises ConfigError where the config asks for something that this family does not compute."""

    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        shape = self.shape(config)
        RotaryEmbedding.from_config(config, shape.head_dim)
        return ModelSpec(
            architecture=self.name,
            layers=required(config, "num_hidden_layers"),
            hidden_size=shape.hidden_size,
            vocab_size=required(config, "vocab_size"),
            context_length=required(config, "max_position_embeddings"),
            kv_width=2 * shape.kv_heads * shape.head_dim,
            tied_head=bool(config.get("tie_word_embeddings", False)),
            config=config,
        )

    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        shape, prefix = self.shape(spec.config), f"model.layers.{layer}"
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return (
            TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,)),
            *_linear(f"{prefix}.self_attn.q_proj", q_rows, hidden, shape.qkv_bias),
            *_linear(f"{prefix}.self_attn.k_proj", kv_rows, hidden, shape.qkv_bias),
            *_linear(f"{prefix}.self_attn.v_proj", kv_rows, hidden, shape.qkv_bias),
            *_linear(f"{prefix}.self_attn.o_proj", hidden, q_rows, shape.output_bias),
            TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            *_linear(f"{prefix}.mlp.gate_proj", inner, hidden, shape.mlp_bias),
            *_linear(f"{prefix}.mlp.up_proj", inner, hidden, shape.mlp_bias),
            *_linear(f"{prefix}.mlp.down_proj", hidden, inner, shape.mlp_bias),
        )

    def end_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        table = (spec.vocab_size, spec.hidden_size)
        head = () if spec.tied_head else (TensorSpec("lm_head.weight", table, packed=True),)
        return (
            TensorSpec("model.embed_tokens.weight", table),
            TensorSpec("model.norm.weight", (spec.hidden_size,)),
            *head,
        )

    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        shape = self.shape(spec.config)
        rotary = RotaryEmbedding.from_config(spec.config, shape.head_dim)
        return DecoderStack([DecoderLayer(shape, layer, weights) for layer in layers], rotary)

    def build_ends(self, spec: ModelSpec, weights: Weights) -> Ends:
        return DecoderEnds(spec, self.shape(spec.config).norm_eps, weights)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] times weight [out_features, in_features] transposed, in the dtype that both have.

    Where a device's kernels for many rows are slow in that dtype, the product is computed in a wider one.
    """
    dtype = matmul_dtype(x.device, x.dtype, len(x))
    if dtype is x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None).to(x.dtype)


class RMSNorm:
    """Root mean square layer normalization (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] of any floating dtype -> the same shape in the weight's dtype."""
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(self.weight.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary angles of a batch's rows: `cos` and `sin` [rows, 1, head_dim], the first half of `sin` negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same, each head's halves rotated against each other."""
        low, high = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((high, low), dim=-1), self.sin)


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021), with the scalings `linear` and `llama3`."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
        """Raises ConfigError for a scaling that is not computed here."""
        scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError("partial rotary embeddings are not supported")
        base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "linear":
            frequencies = frequencies / required(scaling, "factor")
        elif kind == "llama3":
            frequencies = _llama3_scaling(frequencies, scaling)
        elif kind != "default":
            raise ConfigError(f"rope scaling {kind!r} is not supported", "", "supported: default, linear, llama3")
        return cls(frequencies)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """int64 [rows] -> the rows' rotation; angles are computed in float32 whatever the dtype."""
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.float()[:, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(dtype)[:, None, :], torch.cat((-sin, sin), dim=-1).to(dtype)[:, None, :]
        )


class Attention:
    """Causal self-attention with grouped keys and values; q, k and v come from one fused product."""

    def __init__(self, shape: DecoderShape, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.qkv = weights.linear(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self.out = weights.linear(f"{prefix}.o_proj")
        self.layer = layer
        self.head_dim = shape.head_dim
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.scale = shape.head_dim**-0.5

    def __call__(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        qkv = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        qk = rotation(qkv[:, : self.heads + self.kv_heads])
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, self.heads + self.kv_heads :]
        return self.out(batch.attend(self.layer, q, k, v, scale=self.scale).flatten(1))


class GatedMLP:
    """SwiGLU (Shazeer 2020); gate and up come from one fused product."""

    def __init__(self, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}.mlp"
        self.gate_up = weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.down = weights.linear(f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer:
    def __init__(self, shape: DecoderShape, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}"
        self.input_norm = RMSNorm(weights.tensor(f"{prefix}.input_layernorm.weight"), shape.norm_eps)
        self.attention = Attention(shape, layer, weights)
        self.post_norm = RMSNorm(weights.tensor(f"{prefix}.post_attention_layernorm.weight"), shape.norm_eps)
        self.mlp = GatedMLP(layer, weights)

    def __call__(self, hidden: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), rotation, batch)
        return hidden + self.mlp(self.post_norm(hidden))


class DecoderStack:
    """A layer range of a DecoderArchitecture: the rotation is computed once for all of its layers."""

    def __init__(self, layers: list[DecoderLayer], rotary: RotaryEmbedding) -> None:
        self.layers = layers
        self.rotary = rotary
        self.dtype = layers[0].input_norm.weight.dtype

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        rotation = self.rotary(batch.positions, self.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch)
        return hidden


class DecoderEnds:
    """Embedding, final norm and head. A tied head is packed from the embedding's own table."""

    def __init__(self, spec: ModelSpec, eps: float, weights: Weights) -> None:
        self.table = weights.tensor("model.embed_tokens.weight")
        self.norm = RMSNorm(weights.tensor("model.norm.weight"), eps)
        self.head = weights.pack(self.table) if spec.tied_head else weights.linear("lm_head")

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden)).float()


def required(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`. Raises ConfigError naming the key where it is absent."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"the model's config has no {key!r}")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """The width of a head: given, or the hidden size divided among the heads."""
    return int(config.get("head_dim") or required(config, "hidden_size") // required(config, "num_attention_heads"))


def refuse_unless(config: Mapping[str, Any], key: str, supported: Any) -> None:
    """Raises ConfigError where `config` sets `key` to something other than `supported`."""
    value = config.get(key, supported)
    if value != supported:
        raise ConfigError(f"{key} = {value!r} is not supported", "", f"supported: {supported!r}")


def _linear(module: str, rows: int, columns: int, bias: bool) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{module}.weight", (rows, columns), packed=True)
    return (weight, TensorSpec(f"{module}.bias", (rows,))) if bias else (weight,)


def _llama3_scaling(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor = required(scaling, "factor")
    low, high = required(scaling, "low_freq_factor"), required(scaling, "high_freq_factor")
    turns = required(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - kept) * frequencies / factor + kept * frequencies
    return scaled
