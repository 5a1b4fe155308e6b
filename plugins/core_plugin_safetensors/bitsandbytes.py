"""bitsandbytes' weights of 4 bits: what each one is lies in a small tensor beside it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from core import CheckpointError, StoredForm, StoredWeight, TensorInfo, Values
from core_plugin_safetensors.packed import Packed, Tensors, packed, part

if TYPE_CHECKING:
    from torch import Tensor

Peek = Callable[[TensorInfo], bytes]
"""The bytes of a small tensor, of a file that need not be on this machine."""
_KINDS = {f".weight.quant_state.bitsandbytes__{kind}": kind for kind in (Values.NF4, Values.FP4)}
_MOST_SETTINGS = 4096
_AT_ONCE = 8


def find_4_bits(tensors: Tensors, peek: Peek) -> dict[str, Packed]:
    """weight uint8 [out * in / 2, 1], the first of two values in the high bits; weight.absmax, a scale for each block.

    Scales may be quantized themselves: then they are the places in a table of 256, in blocks with scales of their own.
    """
    states = {name: suffix for name in tensors for suffix in _KINDS if name.endswith(suffix)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        settings = list(pool.map(lambda name: _settings(name, tensors[name], peek), states))
    found = {}
    for (name, suffix), own in zip(states.items(), settings, strict=True):
        stem = name.removesuffix(suffix)
        found[f"{stem}.weight"] = _weight(f"{stem}.weight", _KINDS[suffix], tensors, own)
    return found


def _settings(name: str, info: TensorInfo, peek: Peek) -> dict[str, Any]:
    try:
        if info.nbytes <= _MOST_SETTINGS:
            found = json.loads(peek(info))
            rows, columns = found["shape"]
            return {**found, "shape": (int(rows), int(columns)), "blocksize": int(found["blocksize"])}
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{name} in {info.file} is not what bitsandbytes writes", hint="download it again")


def _weight(name: str, kind: Values, tensors: Tensors, settings: dict[str, Any]) -> Packed:
    (rows, columns), block = settings["shape"], settings["blocksize"]
    if block < 1 or columns % block:
        raise CheckpointError(
            f"{name} has blocks of {block} values and rows of {columns}",
            "blocks that reach from one row into the next are not computed with here",
            "use the model's unquantized checkpoint with --quant int4, or a GGUF file",
        )
    values = part(tensors, name, ("U8",), rows * columns // 2, 1)
    nested = f"{name}.nested_absmax" in tensors
    part(tensors, f"{name}.absmax", ("U8",) if nested else ("F32",), rows * columns // block)
    form = StoredForm(kind, block, scale_bytes=2 if nested else 4)
    more = (f"{name}.nested_absmax", f"{name}.nested_quant_map") * nested
    unpack = partial(_nested, rows, settings) if nested else partial(_plain, rows)
    return packed(values, (rows, columns), form, (name, f"{name}.absmax", *more), unpack, str(kind).upper())


def _plain(rows: int, form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    values, scales = parts
    return _stored(rows, form, values, scales)


def _nested(rows: int, settings: dict[str, Any], form: StoredForm, parts: Sequence[Tensor]) -> StoredWeight:
    """What scales of scales make is held in 16 bits, where 8 were stored and a few more."""
    values, places, outer, table = parts
    block, offset = int(settings.get("nested_blocksize", 256)), float(settings.get("nested_offset", 0.0))
    each = outer.repeat_interleave(block)[: len(places)]
    scales = table[places.int()].float().mul_(each).add_(offset)
    return _stored(rows, form, values, scales.half())


def _stored(rows: int, form: StoredForm, values: Tensor, scales: Tensor) -> StoredWeight:
    first_low = values >> 4 | values << 4
    return StoredWeight(form, first_low.view(rows, -1), scales.view(rows, -1))
