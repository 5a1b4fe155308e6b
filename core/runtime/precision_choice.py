"""What `--quant auto` and `--dtype auto` stand for: as a friend would choose for this checkpoint and this device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from core.errors import ConfigError
from core.interfaces.checkpoint import TensorInfo
from core.interfaces.dtypes import DType, KVDType
from core.interfaces.quantizer import Quantizer
from core.plugins import Registry
from core.runtime.device import refuse_dtype
from core.runtime.model import Model, Precision, Storage, choose_wire, runs_in_fp16
from core.runtime.speed import kept_seconds, product_seconds

AUTO = "auto"
_AS_STORED = "fp16"
_KEEPING = "stored"
_BY_BITS = ((4, "int4"), (8, "int8"))
"""A checkpoint that stores its weights in so many bits, or fewer, is packed so."""
_DENSE_BITS = 16
"""A value of so many bits is not quantized."""
_CHEAP_BITS = 8
"""To pack values of so many bits again costs little quality."""
_SLOW = 3.0
"""What keeps weights as they are stored may take so many times as long."""
_MUCH = 1.25
"""What is less exact is to be faster by so much."""
_KEPT = "as the checkpoint is stored: perplexity within 1% of its own where measured"


def refuse_unknown(quant: str, quantizers: Registry[Quantizer]) -> None:
    """Raises PluginError if no quantizer has the name that was asked for."""
    if quant != AUTO:
        quantizers.get(quant)


def choose_precision(
    model: Model,
    quantizers: Registry[Quantizer],
    device: torch.device,
    *,
    quant: str = AUTO,
    dtype: DType | None = None,
    wire: str = AUTO,
    keep_head: bool = False,
    kv: KVDType = KVDType.AUTO,
) -> Precision:
    """What was asked for, and for what was left open: quantized weights as they are stored, if all of them can be kept.

    If not, or if 8 bits are much slower so on `device`, 4-bit weights in int4, 8-bit ones in int8, others as they are.
    Embedding and head go by themselves. Layers compute in what is exact enough for the checkpoint; if that leaves a
    choice, in the faster on `device`.

    Raises ConfigError if layers are to be kept as they are stored, and can't be.
    """
    head = None
    if quant in (AUTO, _KEEPING):
        keeping, storage = quantizers.get(_KEEPING), model.embed_and_head_storage()
        quantizer = _for_bits(model.layer_bits(), quantizers, partial(_layers_bytes, model))
        head = _for_bits(model.embed_and_head_bits(), quantizers, model.embed_and_head_bytes)
        if _keeps_all(keeping, storage):
            head = keeping
        if _keeps_all(keeping, model.layer_storage()):
            quantizer = keeping if quant == _KEEPING or not _is_slow(keeping, quantizer, model, device) else quantizer
        elif quant == _KEEPING:
            raise _not_kept(model.layer_storage(), keeping)
    else:
        quantizer = quantizers.get(quant)
    compute = dtype or quantizer.compute or _compute(model, quantizer, device)
    return Precision(
        quantizer,
        compute,
        choose_wire(wire, compute, model.checkpoint),
        keep_head,
        head,
        _quality(quant, quantizer, compute, model),
        kv,
    )


def _keeps_all(keeping: Quantizer, storage: Storage) -> bool:
    """Whether there are quantized weights, and it keeps all of them as they are stored."""
    quantized = [info.form for info in storage.values() if info.form is not None or _is_quantized(info)]
    return bool(quantized) and all(form is not None and keeping.keeps(form) for form in quantized)


def _is_slow(keeping: Quantizer, again: Quantizer, model: Model, device: torch.device) -> bool:
    """Whether 8-bit weights multiply much faster once `again` has packed them, which costs little quality."""
    kept = (info for info in model.layer_storage().values() if info.form is not None and len(info.shape) == 2)
    largest = max(kept, key=lambda info: math.prod(info.shape), default=None)
    if largest is None or largest.form is None or largest.form.values.bits < _CHEAP_BITS:
        return False
    rows, columns = largest.shape
    packed = product_seconds(again, (rows, columns), [DType.BF16], device)[DType.BF16]
    return kept_seconds(keeping, largest.form, (rows, columns), DType.BF16, device) > _SLOW * packed


def _is_quantized(info: TensorInfo) -> bool:
    return info.bits is not None and info.bits < _DENSE_BITS


def _not_kept(storage: Storage, keeping: Quantizer) -> ConfigError:
    for name, info in storage.items():
        if _is_quantized(info) and not (info.form is not None and keeping.keeps(info.form)):
            return ConfigError(
                f"--quant {_KEEPING} can't keep the weights of this checkpoint as they are",
                f"{name} is stored as {info.dtype}, which is not computed with here",
                "use --quant int4 or int8, which pack it again",
            )
    return ConfigError(
        f"--quant {_KEEPING} keeps weights that are quantized in the checkpoint",
        "those of its layers are not",
        "use --quant int4, int8 or fp16",
    )


def _for_bits(bits: int | None, quantizers: Registry[Quantizer], sized: Callable[[Precision], int]) -> Quantizer:
    """The one with the fewest bits that keeps `bits`, of those that can pack what `sized` gives the bytes of."""
    for most, name in _BY_BITS:
        if bits is not None and bits <= most and _packs(quantizers.get(name), sized):
            return quantizers.get(name)
    return quantizers.get(_AS_STORED)


def _layers_bytes(model: Model, precision: Precision) -> int:
    return sum(model.layer_bytes(layer, precision) for layer in range(model.spec.layers))


def _packs(quantizer: Quantizer, sized: Callable[[Precision], int]) -> bool:
    """int4 packs rows of certain lengths alone."""
    try:
        sized(Precision(quantizer, DType.BF16, DType.BF16))
    except ConfigError:
        return False
    return True


def _compute(model: Model, quantizer: Quantizer, device: torch.device) -> DType:
    """bf16 has fp32's range. fp16 is more exact, and ends at 65,504: for checkpoints alone that run in it."""
    enough = [DType.BF16, DType.FP16] if runs_in_fp16(model.checkpoint) else [DType.BF16]
    possible = [dtype for dtype in enough if refuse_dtype(device, dtype) is None]
    if len(possible) < len(enough) or len(enough) == 1:
        return possible[0] if possible else DType.FP32
    shape = model.largest_linear()
    seconds = product_seconds(quantizer, shape, possible, device) if shape is not None else {}
    is_slow = seconds.get(DType.FP16, math.inf) > _MUCH * seconds.get(DType.BF16, math.inf)
    return DType.BF16 if is_slow else DType.FP16


def _quality(quant: str, quantizer: Quantizer, compute: DType, model: Model) -> str:
    """Against the checkpoint's own weights in fp32."""
    if quantizer.name == _AS_STORED and compute is DType.FP32:
        return "as the checkpoint"
    if quantizer.name == _AS_STORED or quantizer.name == _KEEPING:
        return _KEPT
    if quant == AUTO:
        kinds = sorted({info.dtype for info in model.layer_storage().values() if _is_quantized(info)})
        return f"{' and '.join(kinds)} packed again: perplexity within 1% of the checkpoint's own where measured"
    return quantizer.quality
