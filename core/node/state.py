"""What a node is and holds for as long as its process lives, whatever becomes of its connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.interfaces.transport import Transport
from core.node.stage_loader import Holdings
from core.plugins import PluginHost
from core.runtime.compute import ComputeThread


@dataclass(slots=True)
class Activity:
    """What a face of the node shows; `on_change` is called, in the node's thread, whenever it differs."""

    state: str = "connecting"
    detail: str = ""
    layers: range | None = None
    progress: tuple[int, int] | None = None
    on_change: Callable[[Activity], None] = field(default=lambda _: None)

    def become(self, state: str, detail: str = "", layers: range | None = None) -> None:
        self.state, self.detail, self.layers, self.progress = state, detail, layers, None
        self.on_change(self)

    def advance(self, phase: str, done: int, total: int) -> None:
        """Bytes done and in all of the phase `download` or `load`."""
        self.detail, self.progress = phase, (done, total)
        self.on_change(self)


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    device: torch.device
    max_memory: int | None
    cache_dir: Path | None
    peer_host: str | None
    compute: ComputeThread
    transport: Transport
    plugins: PluginHost
    activity: Activity
    holdings: Holdings = field(default_factory=Holdings)
