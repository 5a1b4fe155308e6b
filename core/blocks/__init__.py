"""Building blocks for the authors of architectures: decoder families that differ in a config, not in their shape.

A family subclasses `DecoderArchitecture` and says in `shape` how its config reads. Attribute and tensor names are
those of Hugging Face checkpoints. The residual stream keeps the dtype that it came in with; norms bring it to the
compute dtype, which the weights have.
"""

from core.blocks.attention import Attention
from core.blocks.config import head_dim, layer_windows, refuse_partial_rotation, refuse_unless, required, size
from core.blocks.decoder import (
    DecoderArchitecture,
    DecoderLayer,
    DecoderSpec,
    DecoderStack,
    PiecewiseDecoderStack,
    PostNormLayer,
)
from core.blocks.embed_and_head import DecoderEmbedAndHead
from core.blocks.latent_attention import LatentAttention
from core.blocks.linear import linear_tensors
from core.blocks.mixture import Mixture, Scoring, first_layers
from core.blocks.mlp import GatedMLP, gelu_tanh
from core.blocks.moe import MixtureOfExperts
from core.blocks.norm import RMSNorm, UnitOffsetRMSNorm
from core.blocks.rope import RotaryEmbedding, Rotation, rope_parameters
from core.blocks.shape import DecoderShape, Delta, Latent
from core.runtime.device import fast_dtype
from core.runtime.kernel_choice import TOLERANCE, Kernel, Kernels, Product, choose_kernels, normal, timed
from core.runtime.stored_weights import dequantise, in_pairs, nibbles, number_table
from core.runtime.unquantized import Plain, PlainLinear, multiply

__all__ = [
    "TOLERANCE",
    "Attention",
    "DecoderArchitecture",
    "DecoderEmbedAndHead",
    "DecoderLayer",
    "DecoderShape",
    "DecoderSpec",
    "DecoderStack",
    "Delta",
    "GatedMLP",
    "Kernel",
    "Kernels",
    "Latent",
    "LatentAttention",
    "Mixture",
    "MixtureOfExperts",
    "PiecewiseDecoderStack",
    "Plain",
    "PlainLinear",
    "PostNormLayer",
    "Product",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "Scoring",
    "UnitOffsetRMSNorm",
    "choose_kernels",
    "dequantise",
    "fast_dtype",
    "first_layers",
    "gelu_tanh",
    "head_dim",
    "in_pairs",
    "layer_windows",
    "linear_tensors",
    "multiply",
    "nibbles",
    "normal",
    "number_table",
    "refuse_partial_rotation",
    "refuse_unless",
    "required",
    "rope_parameters",
    "size",
    "timed",
]
