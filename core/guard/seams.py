"""What each kind of plugin promises, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from core.guard.architectures import (
    check_embed_and_head,
    check_layers,
    check_spec,
    check_tensor_specs,
)
from core.guard.calls import Guard, must_be
from core.guard.checkpoints import check_checkpoint
from core.guard.quantizers import QuantizerChecks
from core.guard.transports import guard_transport
from core.interfaces.architecture import Architecture, CacheSize
from core.interfaces.checkpoint import CheckpointFormat
from core.interfaces.planner import Plan, Planner
from core.interfaces.quantizer import Quantizer
from core.interfaces.transport import Transport

_AS_A_CONFIG_MAY = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading a config raises if that says anything where something else is expected: who asks tells the user."""
_AS_A_DISK_MAY = (OSError,)
"""What `Weights` raises when files can't be read: no fault of who asks for tensors."""


def guard(item: Any, plugin: str) -> None:
    """Has what `item`, an object of a seam's, does wrong named as a mistake of `plugin`."""
    kind = next(kind for kind in _BY_KIND if isinstance(item, kind))
    _BY_KIND[kind](item, plugin)


def _guard_quantizer(item: Quantizer, plugin: str) -> None:
    guard, checks = Guard(plugin, f"quantizer {item.name!r}"), QuantizerChecks(item)
    guard.watch(item, "packed_bytes", checks.size)
    guard.watch(item, "pack", checks.linear)
    guard.watch(item, "pack_embedding", checks.embedding)
    guard.watch(item, "keeps", must_be(bool, "True or False"))
    guard.watch(item, "kept_bytes", checks.size)
    guard.watch(item, "keep", checks.kept)
    guard.watch(item, "report", must_be(str, "a string"))


def _guard_architecture(item: Architecture, plugin: str) -> None:
    guard = Guard(plugin, f"architecture {item.name!r}")
    guard.watch(item, "recognises", must_be(bool, "True or False"))
    for method in ("read_config", "read_model"):
        guard.watch(item, method, check_spec, _AS_A_CONFIG_MAY)
    for method in ("layer_tensors", "non_layer_tensors"):
        guard.watch(item, method, check_tensor_specs, _AS_A_CONFIG_MAY)
    guard.watch(item, "layer_cache", must_be(CacheSize, "a CacheSize"), _AS_A_CONFIG_MAY)
    guard.watch(item, "build_layers", check_layers, _AS_A_DISK_MAY)
    guard.watch(item, "build_embed_and_head", check_embed_and_head, _AS_A_DISK_MAY)


def _guard_format(item: CheckpointFormat, plugin: str) -> None:
    guard = Guard(plugin, f"checkpoint format {item.name!r}")
    guard.watch(item, "recognises", must_be(bool, "True or False"))
    guard.watch(item, "open", partial(check_checkpoint, guard))


def _guard_planner(item: Planner, plugin: str) -> None:
    Guard(plugin, f"planner {item.name!r}").watch(item, "plan", must_be(Plan, "a Plan"))


def _guard_transport(item: Transport, plugin: str) -> None:
    guard_transport(item, Guard(plugin, f"transport {item.name!r}"))


_BY_KIND: Mapping[type[Any], Callable[[Any, str], None]] = {
    Quantizer: _guard_quantizer,
    Architecture: _guard_architecture,
    CheckpointFormat: _guard_format,
    Planner: _guard_planner,
    Transport: _guard_transport,
}
