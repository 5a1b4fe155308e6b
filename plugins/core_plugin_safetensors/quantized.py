"""Quantized checkpoints: which tensors make a weight together, as the config says; of others, what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import CheckpointError
from core_plugin_safetensors.bitsandbytes import Peek, find_4_bits
from core_plugin_safetensors.floats import FP8_SCALES, find_fp8, find_fused_mxfp4, find_mxfp4, find_nvfp4
from core_plugin_safetensors.integers import find_awq, find_compressed_integers, find_gptq, find_int8, find_mlx
from core_plugin_safetensors.packed import Packed, Tensors

_BESIDE = frozenset(
    (
        *FP8_SCALES,
        *("input_scale", "k_scale", "v_scale", "output_scale", "input_global_scale", "weight_scale_2", "g_idx"),
        *("quant_map", "nested_quant_map", "nested_absmax", "absmax"),
        *("weight_shape", "weight_global_scale", "weight_g_idx", "input_zero_point", "weight_format", "SCB"),
    )
)
"""Tensors that are no weights: scales, also those of activations, which are not quantized here."""
_INSTEAD = {
    "compressed-tensors": "its weights are not all of one of the formats that are read",
}
_HINT = "use the model's unquantized checkpoint with --quant int4 or int8, or a GGUF file"


def find_packed(config: Mapping[str, Any], tensors: Tensors, where: str, peek: Peek) -> dict[str, Packed]:
    """By the names of the weights, what makes each one. Raises CheckpointError for a quantization that isn't read."""
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping):
        return {}
    method = str(settings.get("quant_method", "mlx" if "group_size" in settings else "quantization"))
    match method:
        case "awq":
            return find_awq(tensors, settings)
        case "gptq":
            return find_gptq(tensors, settings)
        case "fp8":
            return find_fp8(tensors, settings)
        case "mxfp4":
            return find_fused_mxfp4(tensors)
        case "mlx" if settings.get("mode", "affine") == "affine":
            return find_mlx(tensors, settings)
        case "bitsandbytes" if settings.get("load_in_8bit"):
            return find_int8(tensors, "SCB", "LLM.int8", divisor=127.0)
        case "bitsandbytes":
            return find_4_bits(tensors, peek)
        case "modelopt" if settings.get("quant_algo") == "NVFP4":
            return find_nvfp4(tensors, ("weight", "weight_scale", "weight_scale_2"), divides=False)
        case "modelopt" if settings.get("quant_algo") == "FP8":
            return find_fp8(tensors, settings)
        case "compressed-tensors":
            return _find_compressed(tensors, settings, where)
    raise _unread(method, where)


def _find_compressed(tensors: Tensors, settings: Mapping[str, Any], where: str) -> dict[str, Packed]:
    match settings.get("format"):
        case "float-quantized":
            return find_fp8(tensors, settings)
        case "int-quantized":
            return find_int8(tensors, "weight_scale", "int-quantized")
        case "naive-quantized":
            return find_fp8(tensors, settings) | find_int8(tensors, "weight_scale", "int-quantized")
        case "pack-quantized":
            return find_compressed_integers(tensors, _bits(settings, where))
        case "nvfp4-pack-quantized":
            return find_nvfp4(tensors, ("weight_packed", "weight_scale", "weight_global_scale"), divides=True)
        case "mxfp4-pack-quantized":
            return find_mxfp4(tensors)
    raise _unread("compressed-tensors", where)


def _bits(settings: Mapping[str, Any], where: str) -> int:
    """Of all groups of modules, which are to have the same."""
    groups = settings.get("config_groups") or {}
    bits = {group["weights"].get("num_bits") for group in groups.values() if group.get("weights")}
    if len(bits) != 1:
        raise _unread("compressed-tensors", where)
    return int(bits.pop())


def _unread(method: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where} is quantized with {method}", _INSTEAD.get(method, "that is not read"), _HINT)


def is_beside(name: str) -> bool:
    """Whether a tensor belongs to a quantized weight, and is none itself."""
    return name.rpartition(".")[2] in _BESIDE or ".quant_state." in name
