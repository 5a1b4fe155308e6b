"""The layers that an architecture built, while they compute."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from core.errors import PluginError
from core.guard.calls import is_excused, raised, shown

if TYPE_CHECKING:
    from torch import Tensor

    from core.interfaces.architecture import Batch, LayerStack

_log = logging.getLogger(__name__)


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
        raise _failure(stack, hidden, f"gave {shown(result)}, and they must give the shape and dtype that they get")
    return result


def _failure(stack: LayerStack, hidden: Tensor, what: str) -> PluginError:
    kind = type(stack)
    whose = f"layers of {kind.__module__}.{kind.__qualname__}"
    return PluginError(f"{whose} failed", f"given {shown(hidden)}, they {what}")
