"""A decoder family: its tensors, its layers, and a range of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from core.blocks.attention import Attention
from core.blocks.config import required
from core.blocks.ends import DecoderEnds
from core.blocks.mlp import GatedMLP
from core.blocks.norm import RMSNorm
from core.blocks.rope import RotaryEmbedding, Rotation
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import Architecture, Batch, Ends, LayerStack, ModelSpec, TensorSpec, Weights


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


def _linear(module: str, rows: int, columns: int, bias: bool) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{module}.weight", (rows, columns), packed=True)
    return (weight, TensorSpec(f"{module}.bias", (rows,))) if bias else (weight,)
