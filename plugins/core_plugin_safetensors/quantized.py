"""Quantized checkpoints: 8-bit floating-point weights are read with their scales; of the others, what to use instead.

FP8 as in transformers' fine-grained FP8 (DeepSeek-V3, Qwen3: blocks of `weight_block_size`, `weight_scale_inv`) and in
compressed-tensors' float-quantized (`weight_scale`, per tensor or per output channel).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from core import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SCALES = ("weight_scale_inv", "weight_scale")
_OTHER_SCALES = ("input_scale", "k_scale", "v_scale", "output_scale")
"""Of activations, which are not quantized here."""
_INSTEAD = {
    "awq": "AWQ packs 4-bit integers for CUDA kernels",
    "gptq": "GPTQ packs 4-bit integers in an order of its own",
    "bitsandbytes": "bitsandbytes stores blocks that its own CUDA library reads",
    "compressed-tensors": "of compressed-tensors, only 8-bit floating-point weights are read",
}
_HINT = "use the model's unquantized checkpoint with --quant int4 or int8, or a GGUF file"


def require_readable(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a kind of quantization that isn't read, with what to use instead."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return
    method = str(found.get("quant_method", "quantization"))
    if method == "fp8" or (method == "compressed-tensors" and found.get("format") == "float-quantized"):
        return
    raise CheckpointError(f"{where} is quantized with {method}", _INSTEAD.get(method, "that is not read"), _HINT)


def scales_of(names: Iterable[str]) -> dict[str, str]:
    """By a weight's name, that of its scale."""
    known = set(names)
    weights = [name for name in known if name.endswith(".weight")]
    candidates = ((name, name.removesuffix("weight") + scale) for name in weights for scale in SCALES)
    return {name: scale for name, scale in candidates if scale in known}


def is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in (*SCALES, *_OTHER_SCALES)


def dequantise(weight: Tensor, scale: Tensor, config: Mapping[str, Any]) -> Tensor:
    """float32 [out, in] from 8-bit floating-point `weight` and `scale`: one value, one per row, or one per block.

    Raises CheckpointError where the scale fits none of these.
    """
    import torch

    rows, columns = weight.shape
    block_rows, block_columns = config.get("quantization_config", {}).get("weight_block_size") or (rows, columns)
    blocks = (-(-rows // block_rows), -(-columns // block_columns))
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return weight.to(torch.float32) * scale.reshape(())
    if scale.numel() == rows and (scale.dim() == 1 or scale.shape[1] == 1):
        return weight.to(torch.float32) * scale.reshape(rows, 1)
    if tuple(scale.shape) != blocks:
        raise CheckpointError(
            f"a scale of {list(scale.shape)} fits no weight of {[rows, columns]}",
            f"blocks of {[block_rows, block_columns]} have scales of {list(blocks)}",
        )
    by_row = scale.repeat_interleave(block_rows, 0)[:rows]
    return weight.to(torch.float32) * by_row.repeat_interleave(block_columns, 1)[:, :columns]
