"""What a node is and holds for as long as its process lives, whatever becomes of its connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import trio

from core.interfaces.transport import Transport
from core.node.disk_record import DiskRecord
from core.node.layer_keeper import LayerKeeper
from core.plugins import PluginHost
from core.runtime.compute import ComputeThread
from core.runtime.layer_times import KeptTimes
from core.runtime.speed import WeightSpeed
from core.trust.cluster import Membership
from core.trust.identity import Identity

LEAVE_SECONDS = 35.0
"""A little more than a coordinator gives the generations that run on a node which pauses."""


@dataclass(slots=True)
class Activity:
    """What a face of the node shows; `on_change` is called, in the node's thread, whenever state or progress differ.

    `code` is what the host is to be told while it is asked.
    State, `layers` and the `model` that they are of are those of the newest hop; `weight_bytes` and `kv_bytes` are held
    for all of them, and for later ones. `tokens` counts the rows that passed through them since the process began.
    """

    state: str = "connecting"
    detail: str = ""
    code: str = ""
    layers: range | None = None
    progress: tuple[int, int] | None = None
    model: str = ""
    weight_bytes: int = 0
    kv_bytes: int = 0
    tokens: int = 0
    on_change: Callable[[Activity], None] = field(default=lambda _: None)

    def become(self, state: str, detail: str = "", layers: range | None = None, code: str = "") -> None:
        self.state, self.detail, self.layers, self.progress, self.code = state, detail, layers, None, code
        self.on_change(self)

    def advance(self, phase: str, done: int, total: int) -> None:
        """Bytes done and in all of the phase `download`, `verify`, `load` or `compile`."""
        self.detail, self.progress = phase, (done, total)
        self.on_change(self)


class Duty:
    """Whether the node takes layers. Its owner sets it, in the node's trio thread; coordinators are told.

    `paused` is why it takes none, `leaving` why it is about to end; "" where it doesn't. `patience` is how many seconds
    a node that leaves gives the generations that run on it.
    """

    def __init__(self) -> None:
        self.paused = ""
        self.leaving = ""
        self.patience = LEAVE_SECONDS
        self._changed = trio.Event()

    def pause(self, reason: str) -> None:
        """What runs on its layers is finished first, within the coordinator's patience. No reason: as `resume`."""
        self._set(reason or self.leaving, self.leaving)

    def resume(self) -> None:
        """A node that leaves stays paused."""
        self._set(self.leaving, self.leaving)

    def leave(self, reason: str, patience: float = LEAVE_SECONDS) -> None:
        """The node pauses, says goodbye and ends."""
        self.patience = patience
        self._set(self.paused or reason, reason)

    def _set(self, paused: str, leaving: str) -> None:
        if (paused, leaving) != (self.paused, self.leaving):
            self.paused, self.leaving = paused, leaving
            self._changed.set()
            self._changed = trio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()

    async def wait_leave(self) -> None:
        while not self.leaving:
            await self.wait_change()


class Presence:
    """Whether a coordinator has welcomed this node, and how long ago the last one went."""

    def __init__(self) -> None:
        self._there = False
        self._since = trio.current_time()
        self._changed = trio.Event()

    @contextmanager
    def welcomed(self) -> Iterator[None]:
        self._become(True)
        try:
            yield
        finally:
            self._become(False)

    @property
    def alone_for(self) -> float:
        """Seconds without a coordinator, from the start of the process on."""
        return 0.0 if self._there else trio.current_time() - self._since

    async def wait_alone(self, seconds: float) -> None:
        """Until that long passed without one."""
        while True:
            changed, left = self._changed, math.inf if self._there else seconds - self.alone_for
            with trio.move_on_after(max(0, left)) as waited:
                await changed.wait()
            if waited.cancelled_caught and self.alone_for >= seconds:
                return

    async def wait_welcomed(self) -> None:
        while not self._there:
            await self._changed.wait()

    def _become(self, there: bool) -> None:
        self._there, self._since = there, trio.current_time()
        self._changed.set()
        self._changed = trio.Event()


@dataclass(frozen=True, slots=True)
class Node:
    """`compute` runs batches, `loads` reads layers. `speed` stands in for the `times` of layers that it never had."""

    node_id: str
    device: torch.device
    speed: WeightSpeed
    times: KeptTimes
    disk: DiskRecord
    labels: tuple[str, ...]
    max_memory: int | None
    cache_dir: Path | None
    compiles: bool
    peer_host: str | None
    local_token: bytes | None
    identity: Identity
    membership: Membership | None
    compute: ComputeThread
    loads: ComputeThread
    keeper: LayerKeeper
    presence: Presence
    transport: Transport
    plugins: PluginHost
    activity: Activity
    duty: Duty = field(default_factory=Duty)
