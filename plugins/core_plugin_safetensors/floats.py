"""Weights of small floats: FP8, MXFP4 and NVFP4, in each layout that is published.

Each `find` gives, by the names of the weights, what makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core import CheckpointError, StoredForm, StoredWeight, TensorInfo, Values
from core_plugin_safetensors.packed import SCALE_BYTES, Packed, Tensors, packed, part, stems

if TYPE_CHECKING:
    from torch import Tensor

FP8 = {"F8_E4M3": Values.E4M3, "F8_E5M2": Values.E5M2}
FP8_SCALES = ("weight_scale_inv", "weight_scale")
_MX_BLOCK, _NV_BLOCK = 32, 16


def find_fp8(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Packed]:
    """weight [out, in], with one scale, one per output channel, or one per block of `weight_block_size`."""
    found = {}
    for stem in stems(tensors, ".weight"):
        name, values = f"{stem}.weight", tensors[f"{stem}.weight"]
        scale = next((f"{stem}.{suffix}" for suffix in FP8_SCALES if f"{stem}.{suffix}" in tensors), None)
        if scale is not None and values.dtype in FP8 and len(values.shape) == 2:
            form = _fp8_form(values, tensors[scale], settings.get("weight_block_size"))
            found[name] = packed(values, values.shape, form, (name, scale), _fp8, values.dtype)
    return found


def _fp8_form(values: TensorInfo, scale: TensorInfo, block: Sequence[int] | None) -> StoredForm:
    rows, columns = values.shape
    scales, kind = scale.shape, FP8[values.dtype]
    if sum(size > 1 for size in scales) == 0:
        block = rows, columns
    elif scales[0] == rows and all(size == 1 for size in scales[1:]):
        block = 1, columns
    down, across = block or (rows, columns)
    return StoredForm(kind, across, down, SCALE_BYTES.get(scale.dtype, 4))


def _fp8(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    values, scales = parts
    rows, columns = values.shape
    blocks = form.blocks((rows, columns))
    if scales.numel() != blocks[0] * blocks[1] or (scales.dim() == 2 and tuple(scales.shape) != blocks):
        raise CheckpointError(
            f"a scale of {list(scales.shape)} fits no weight of {[rows, columns]}",
            f"blocks of {[form.rows, form.columns]} have scales of {list(blocks)}",
        )
    return StoredWeight(form, values, scales.reshape(blocks))


def find_fused_mxfp4(tensors: Tensors) -> dict[str, Packed]:
    """gpt-oss' experts: blocks uint8 [experts, out, in / 32, 16], scales uint8 [experts, out, in / 32].

    Unquantized they are one tensor [experts, in, out].
    """
    found = {}
    for name in stems(tensors, "_blocks"):
        values = part(tensors, f"{name}_blocks", ("U8",), None, None, None, _MX_BLOCK // 2)
        experts, rows, across, _ = values.shape
        part(tensors, f"{name}_scales", ("U8",), experts, rows, across)
        form = StoredForm(Values.E2M1, _MX_BLOCK, scale_bytes=1)
        shape = (experts, across * _MX_BLOCK, rows)
        weight = packed(values, shape, form, (f"{name}_blocks", f"{name}_scales"), _mxfp4, "MXFP4")
        found[name] = replace(weight, transposed=True)
    return found


def find_mxfp4(tensors: Tensors) -> dict[str, Packed]:
    """compressed-tensors: weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32]."""
    found = {}
    for stem in stems(tensors, "weight_packed"):
        values = part(tensors, f"{stem}weight_packed", ("U8",), None, None)
        rows, columns = values.shape[0], 2 * values.shape[1]
        part(tensors, f"{stem}weight_scale", ("U8",), rows, columns // _MX_BLOCK)
        form = StoredForm(Values.E2M1, _MX_BLOCK, scale_bytes=1)
        names = (f"{stem}weight_packed", f"{stem}weight_scale")
        found[f"{stem}weight"] = packed(values, (rows, columns), form, names, _mxfp4, "MXFP4")
    return found


def _mxfp4(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    import torch

    values, scales = parts
    return StoredWeight(form, values.flatten(1), scales.view(torch.float8_e8m0fnu))


def find_nvfp4(tensors: Tensors, names: tuple[str, str, str], *, divides: bool) -> dict[str, Packed]:
    """`names` are those of values uint8 [out, in / 2], scales E4M3 [out, in / 16], and the scale of all scales.

    compressed-tensors divides by the latter, and modelopt multiplies with it.
    """
    found = {}
    for stem in stems(tensors, f".{names[1]}"):
        own = [f"{stem}.{name}" for name in names]
        if own[0] in tensors and tensors[own[0]].dtype == "U8":
            values = part(tensors, own[0], ("U8",), None, None)
            rows, columns = values.shape[0], 2 * values.shape[1]
            part(tensors, own[1], ("F8_E4M3",), rows, columns // _NV_BLOCK)
            form = StoredForm(Values.E2M1, _NV_BLOCK, scale_bytes=1)
            unpack = _nvfp4_divided if divides else _nvfp4
            found[f"{stem}.weight"] = packed(values, (rows, columns), form, own, unpack, "NVFP4")
    return found


def _nvfp4(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    values, scales, scale = parts
    return StoredWeight(form, values, scales, factor=float(scale))


def _nvfp4_divided(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    values, scales, scale = parts
    return StoredWeight(form, values, scales, factor=1 / float(scale))
