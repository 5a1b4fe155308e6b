"""Weights of 4 and 8 bit integers in groups: how AWQ, GPTQ, compressed-tensors and MLX lay them out.

Each `find` gives, by the names of the weights, what makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from core import CheckpointError, StoredForm, StoredWeight, TensorInfo, Values
from core_plugin_safetensors.packed import SCALE_BYTES, Packed, Tensors, group_size, packed, part, stems

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = ("F16", "BF16", "F32")
_VALUES = {4: Values.INT4, 8: Values.INT8}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, that each four bits of a word are of."""
_HINT = "use the model's unquantized checkpoint with --quant int4 or int8, or a GGUF file"


def find_awq(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Packed]:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out] (AutoAWQ's GEMM version)."""
    version = str(settings.get("version", "gemm")).lower()
    if settings.get("bits", 4) != 4 or version != "gemm":
        raise CheckpointError(f"AWQ of {settings.get('bits')} bits in the order {version!r} is not read", hint=_HINT)
    found = {}
    for stem in stems(tensors, "qweight"):
        values = part(tensors, f"{stem}qweight", ("I32",), None, None)
        columns, rows = values.shape[0], 8 * values.shape[1]
        scales = part(tensors, f"{stem}scales", _FLOATS, None, rows)
        part(tensors, f"{stem}qzeros", ("I32",), scales.shape[0], values.shape[1])
        form = _form(4, stem, columns, scales, scales.shape[0])
        names = (f"{stem}qweight", f"{stem}scales", f"{stem}qzeros")
        found[f"{stem}weight"] = packed(values, (rows, columns), form, names, _awq, "AWQ")
    return found


def _awq(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    from core_plugin_safetensors.unpacking import in_order, words_to_values

    values, scales, zeros = parts
    values, zeros = (in_order(words_to_values(each, 4), _AWQ_ORDER) for each in (values, zeros))
    return _with_zero_points(form, values.t(), scales.t(), zeros.t())


def find_gptq(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Packed]:
    """qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out]."""
    bits = settings.get("bits")
    if bits not in _VALUES:
        raise CheckpointError(f"GPTQ of {bits} bits is not read", "that of 4 and 8 bits is", _HINT)
    if settings.get("desc_act") and settings.get("group_size") != -1:
        raise CheckpointError(
            "this GPTQ checkpoint has its columns in the order of their activations (desc_act)",
            "then groups are not of neighbouring columns, which is not computed here",
            "use a GPTQ checkpoint without desc_act, an AWQ one, or a GGUF file",
        )
    per_word, found = 32 // bits, {}
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    for stem in stems(tensors, "qweight"):
        values = part(tensors, f"{stem}qweight", ("I32",), None, None)
        columns, rows = per_word * values.shape[0], values.shape[1]
        scales = part(tensors, f"{stem}scales", _FLOATS, None, rows)
        part(tensors, f"{stem}qzeros", ("I32",), scales.shape[0], rows // per_word)
        form = _form(bits, stem, columns, scales, scales.shape[0])
        names = (f"{stem}qweight", f"{stem}scales", f"{stem}qzeros")
        found[f"{stem}weight"] = packed(values, (rows, columns), form, names, partial(_gptq, shift), "GPTQ")
    return found


def _gptq(shift: int, form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    """`shift` is what zero points were made smaller by before they were stored."""
    from core_plugin_safetensors.unpacking import words_to_values

    values, scales, zeros = parts
    bits = form.values.bits
    points = words_to_values(zeros, bits).add_(shift) & (1 << bits) - 1
    return _with_zero_points(form, words_to_values(values.t().contiguous(), bits), scales.t(), points.t())


def find_compressed_integers(tensors: Tensors, bits: int) -> dict[str, Packed]:
    """weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], weight_zero_point int32, as packed, but
    along the output dimension, [out * bits / 32, groups].

    Without a zero point, the value in the middle stands for 0.
    """
    if bits not in _VALUES:
        raise CheckpointError(f"compressed-tensors of {bits} bits are not read", "those of 4 and 8 bits are", _HINT)
    found = {}
    for stem in stems(tensors, "weight_packed"):
        if f"{stem}weight_g_idx" in tensors:
            raise CheckpointError(f"the columns of {stem}weight are in the order of their activations", hint=_HINT)
        values = part(tensors, f"{stem}weight_packed", ("I32",), None, None)
        rows, columns = values.shape[0], values.shape[1] * 32 // bits
        scales = part(tensors, f"{stem}weight_scale", _FLOATS, rows, None)
        form = _form(bits, stem, columns, scales, scales.shape[1], zeros=f"{stem}weight_zero_point" in tensors)
        suffixes = ("weight_packed", "weight_scale", *("weight_zero_point",) * form.zeros)
        names = [f"{stem}{suffix}" for suffix in suffixes]
        found[f"{stem}weight"] = packed(values, (rows, columns), form, names, _compressed, "pack-quantized")
    return found


def _compressed(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    from core_plugin_safetensors.unpacking import words_to_values

    values, scales, *zeros = parts
    bits = form.values.bits
    points = words_to_values(zeros[0].t().contiguous(), bits)[:, : len(values)].t() if zeros else None
    return _with_zero_points(form, words_to_values(values, bits), scales, points)


def find_int8(tensors: Tensors, scale: str, kind: str, divisor: float = 1.0) -> dict[str, Packed]:
    """weight int8 [out, in], with a scale per output channel in the tensor named `scale`, which is divided."""
    found = {}
    for stem in stems(tensors, ".weight"):
        name = f"{stem}.{scale}"
        if tensors[f"{stem}.weight"].dtype == "I8" and name in tensors:
            values = part(tensors, f"{stem}.weight", ("I8",), None, None)
            form = StoredForm(Values.INT8, values.shape[1], scale_bytes=SCALE_BYTES[tensors[name].dtype])
            parts = (f"{stem}.weight", name)
            found[parts[0]] = packed(values, values.shape, form, parts, partial(_int8, divisor), kind)
    return found


def _int8(divisor: float, form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    values, scales = parts
    return StoredWeight(form, values, scales.reshape(-1, 1).expand(len(values), 1), factor=1 / divisor)


def find_mlx(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Packed]:
    """weight uint32 [out, in * bits / 32], scales and biases [out, groups]: weight = value * scale + bias."""
    found = {}
    for stem in stems(tensors, "scales"):
        values = part(tensors, f"{stem}weight", ("U32",), None, None)
        scales = part(tensors, f"{stem}scales", _FLOATS, values.shape[0], None)
        part(tensors, f"{stem}biases", _FLOATS, *scales.shape)
        columns = scales.shape[1] * int(settings.get("group_size", 64))
        bits = 32 * values.shape[1] // columns
        if bits not in _VALUES:
            raise CheckpointError(f"{stem}weight is of {bits} bits", "MLX's 4 and 8 bits are read", _HINT)
        form = _form(bits, stem, columns, scales, scales.shape[1])
        names = (f"{stem}weight", f"{stem}scales", f"{stem}biases")
        found[names[0]] = packed(values, (values.shape[0], columns), form, names, _mlx, "MLX")
    return found


def _mlx(form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    from core_plugin_safetensors.unpacking import words_to_values

    values, scales, biases = parts
    middle = 1 << form.values.bits - 1
    return _stored(form, words_to_values(values, form.values.bits), scales, biases.float().add(scales, alpha=middle))


def _form(bits: int, stem: str, columns: int, scales: TensorInfo, groups: int, *, zeros: bool = True) -> StoredForm:
    return StoredForm(
        _VALUES[bits],
        group_size(f"{stem}weight", columns, groups),
        scale_bytes=SCALE_BYTES[scales.dtype],
        zeros=zeros,
    )


def _with_zero_points(form: StoredForm, values: Tensor, scales: Tensor, points: Tensor | None) -> StoredWeight:
    """values uint8 [rows, columns] of which `points` [rows, groups] stand for 0."""
    middle = 1 << form.values.bits - 1
    zeros = (middle - points.float()) * scales.float() if points is not None else None
    return _stored(form, values, scales, zeros)


def _stored(form: StoredForm, values: Tensor, scales: Tensor, zeros: Tensor | None) -> StoredWeight:
    from core_plugin_safetensors.unpacking import as_stored

    return StoredWeight(form, as_stored(values, form.values), scales, zeros)
