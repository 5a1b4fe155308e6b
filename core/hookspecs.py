"""The hooks, nothing else. Each hands back classes; a plugin implements those that it has something for."""

from __future__ import annotations

import pluggy

from core.interfaces.architecture import Architecture
from core.interfaces.checkpoint import CheckpointFormat
from core.interfaces.planner import Planner
from core.interfaces.quantizer import Quantizer
from core.interfaces.transport import Transport

PROJECT = "core"
API_VERSION = 1
"""Raised when a hook or an interface changes in a way that breaks plugins. A plugin says in CORE_API_VERSION for which
it was made; one that says nothing was made for the first."""
hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def core_architectures() -> list[type[Architecture]]:  # type: ignore[empty-body]
    """Model families, chosen by the checkpoint's model_type."""


@hookspec
def core_quantizers() -> list[type[Quantizer]]:  # type: ignore[empty-body]
    """Weight formats, chosen by `--quant`."""


@hookspec
def core_transports() -> list[type[Transport]]:  # type: ignore[empty-body]
    """Ways for two machines to reach each other, chosen by `--transport`."""


@hookspec
def core_planners() -> list[type[Planner]]:  # type: ignore[empty-body]
    """Ways to divide the layers among nodes, chosen by `--planner`."""


@hookspec
def core_checkpoint_formats() -> list[type[CheckpointFormat]]:  # type: ignore[empty-body]
    """Kinds of model files, chosen by who recognises `--model`."""
