"""The layers that an architecture built, while they compute."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from core.errors import PluginError
from core.guard.calls import HINT, Call, is_excused, raised, shown

if TYPE_CHECKING:
    from torch import Tensor

    from core.interfaces.architecture import Batch, LayerStack

_log = logging.getLogger(__name__)


class _Builder(NamedTuple):
    """Of a Call, what does not hold on to weights."""

    plugin: str
    item: str


_BUILDERS: WeakKeyDictionary[LayerStack, _Builder] = WeakKeyDictionary()


def note_builder(call: Call, stack: LayerStack) -> None:
    """Remembers whose fault it is if `stack` fails, as far as it can be remembered by it."""
    try:
        _BUILDERS[stack] = _Builder(call.plugin, call.item)
    except TypeError:
        return


def compute_layers(stack: LayerStack, hidden: Tensor, batch: Batch) -> Tensor:
    """What `stack` makes of `hidden`. Raises PluginError if that is not of the same shape and dtype."""
    try:
        result = stack(hidden, batch)
    except Exception as error:
        if is_excused(error):
            raise
        _log.debug("layers failed", exc_info=error)
        raise _failure(stack, hidden, raised(error)) from error
    if getattr(result, "shape", None) != hidden.shape or result.dtype != hidden.dtype:
        raise _failure(stack, hidden, f"gave {shown(result)}, and not the shape and dtype that they got")
    return result


def _failure(stack: LayerStack, hidden: Tensor, what: str) -> PluginError:
    kind, what = type(stack), f"given {shown(hidden)}, {what}"
    try:
        plugin, item = _BUILDERS[stack]
    except (KeyError, TypeError):
        return PluginError(f"layers of {kind.__module__}.{kind.__qualname__} failed", what, HINT)
    return PluginError(f"{plugin} failed", f"layers of its {item}, {what}", HINT)
