"""What quantizers promise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from core.guard.calls import Call, is_excused, raised, shown
from core.interfaces.dtypes import DType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.interfaces.quantizer import Quantizer

_TRIED_ROWS = (1, 2)
_DTYPES = {"float16": DType.FP16, "bfloat16": DType.BF16, "float32": DType.FP32}


class QuantizerChecks:
    """Of one quantizer. What it packs is tried once for each shape, dtype and device."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._tried: set[tuple[object, ...]] = set()

    def size(self, call: Call, given: Any) -> int:
        if type(given) is not int or given < 0:
            raise call.gave(shown(given), "a whole number of bytes")
        return given

    def linear(self, call: Call, packed: Any) -> Any:
        weight, bias = call.args
        _refuse_other_size(call, packed, bias, *self._packed(weight))
        if self._is_new("linear", call, bias is None):
            rows, columns = weight.shape
            for batch in _TRIED_ROWS:
                _try(call, "", packed, _ones(call, batch, columns), (batch, rows))
        return packed

    def kept(self, call: Call, kept: Any) -> Any:
        weight, bias = call.args
        _refuse_other_size(
            call, kept, bias, "kept_bytes", partial(self._quantizer.kept_bytes, weight.shape, weight.form)
        )
        return kept

    def embedding(self, call: Call, packed: Any) -> Any:
        (weight,) = call.args
        _refuse_other_size(call, packed, None, *self._packed(weight))
        if not callable(getattr(packed, "rows", None)):
            raise call.gave(shown(packed), "what looks up `rows` too")
        if self._is_new("embedding", call, True):
            rows, columns = weight.shape
            _try(call, "", packed, _ones(call, 1, columns), (1, rows))
            _try(call, ".rows", packed.rows, _ones(call, 2).long() * 0, (2, columns))
        return packed

    def _is_new(self, what: str, call: Call, *more: object) -> bool:
        key = (what, tuple(call.args[0].shape), call.options["dtype"], call.options["device"], *more)
        is_new = key not in self._tried
        self._tried.add(key)
        return is_new

    def _packed(self, weight: Tensor) -> tuple[str, Callable[[DType], int]]:
        rows, columns = weight.shape
        return "packed_bytes", partial(self._quantizer.packed_bytes, (rows, columns))


def _refuse_other_size(call: Call, given: Any, bias: Tensor | None, by: str, said_of: Callable[[DType], int]) -> None:
    """Raises PluginError unless `given` multiplies and, without a bias, holds what `by` said of a compute dtype."""
    nbytes = getattr(given, "nbytes", None)
    if not callable(given) or not isinstance(nbytes, int):
        raise call.gave(shown(given), "what multiplies, and has an int `nbytes`")
    said = said_of(_DTYPES[_name(call.options["dtype"])])
    if bias is None and nbytes != said:
        raise call.gave(f"what holds {nbytes} bytes", f"what holds the {said} that {by} says")


def _ones(call: Call, *shape: int) -> Tensor:
    import torch

    return torch.ones(shape, dtype=call.options["dtype"], device=call.options["device"])


def _try(call: Call, attribute: str, compute: Callable[[Tensor], Any], x: Tensor, shape: tuple[int, int]) -> None:
    """Raises PluginError unless `compute`, the `attribute` of what the call gave, makes a tensor of `shape`, in the
    compute dtype."""
    import torch

    dtype = call.options["dtype"]
    must = f"what makes {_name(dtype)} {list(shape)} of it"
    try:
        with torch.no_grad():
            y = compute(x)
    except Exception as error:
        if is_excused(error):
            raise
        raise call.gave(f"what{attribute}, given {shown(x)}, {raised(error)}", must) from error
    if not isinstance(y, torch.Tensor) or y.shape != shape or y.dtype != dtype:
        raise call.gave(f"what{attribute} makes {shown(y)} of {shown(x)}", must)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
