"""NODE_STATE: what a node holds, for all its hops together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import trio

from core.link import Link
from core.node.state import Node
from core.plugins import PluginHost
from core.protocol.fields import Holding, LayerTime, PeerLink, Plugin, clipped
from core.protocol.messages import NodeState
from core.runtime.device import free_memory
from core.runtime.stage import Stage

_STATE_SECONDS = 0.25
_TOLD_TIMES = 64
_TOLD_PLUGINS, _TOLD_ADDS = 128, 256
_NEEDED = ("architecture ", "quantizer ", "checkpoint format ")


class ReportedHop(Protocol):
    """What is told of a hop."""

    stage: Stage | None

    @property
    def link_onward(self) -> PeerLink | None: ...
    def tell_times(self) -> None: ...


class StateReport:
    """`run` it in a task: it tells the coordinator what `changed`, a few times in a second at most."""

    def __init__(
        self,
        node: Node,
        control: Link,
        hops: Callable[[], Sequence[ReportedHop]],
    ) -> None:
        self._node = node
        self._control = control
        self._hops = hops
        self._kv_room: int | None = None
        self._told_nbytes = 0
        """Of layers, when the room beside them was measured."""
        self._holdings: list[Holding] = []
        self._changed = trio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self.tell()
            await trio.sleep(_STATE_SECONDS)

    async def tell(self, *, layers_changed: bool = False) -> None:
        """Counts in the compute thread, which owns the caches.

        The room for them is measured when layers changed, also by a load whose end nobody waited for, and always told
        with the layers that it is beside.
        """
        node = self._node
        hops = self._hops()
        usage = await node.compute.run(_usage_of, [hop.stage for hop in hops if hop.stage is not None])
        for hop in hops:
            hop.tell_times()
        if layers_changed or self._kv_room is None or node.keeper.nbytes > self._told_nbytes:
            self._told_nbytes = node.keeper.nbytes
            self._kv_room, self._holdings = node.keeper.kv_room(usage.kv_bytes), node.keeper.holdings()
            node.keeper.caches.promise(self._kv_room, at_most=node.keeper.bound)
        node.activity.kv_bytes, node.activity.weight_bytes = usage.kv_bytes, node.keeper.nbytes
        state = NodeState(
            *usage,
            free_memory(node.device),
            self._kv_room,
            self._holdings,
            layer_times=layer_times(node),
            links=[link for hop in hops if (link := hop.link_onward) is not None],
            on_disk=node.disk.told,
            load_speed=node.disk.speed,
        )
        await self._control.send(state)


def installed(plugins: PluginHost) -> list[Plugin]:
    """What a model may need of them, as much as the wire has room for."""
    added = [(each, [name for name in each.adds if name.startswith(_NEEDED)][:_TOLD_ADDS]) for each in plugins.loaded]
    told = [
        Plugin(_name(each.distribution), _name(each.version), list(map(_name, adds))) for each, adds in added if adds
    ]
    return told[:_TOLD_PLUGINS]


def _name(text: str) -> str:
    """As far as a `Name` field takes it."""
    return clipped(text)[:256]


def layer_times(node: Node) -> list[LayerTime]:
    """As many as the wire has room for, of the kinds of layers that it had to do with last."""
    return [
        LayerTime(kind, round(times.row * 1e9), round(times.chunk * 1e9))
        for kind, times in list(node.times.by_kind.items())[-_TOLD_TIMES:]
    ]


class _Usage(NamedTuple):
    sessions: int
    kv_tokens: int
    kv_bytes: int


def _usage_of(stages: Sequence[Stage]) -> _Usage:
    caches = [stage.caches for stage in stages]
    return _Usage(sum(map(len, caches)), sum(each.tokens for each in caches), sum(each.nbytes for each in caches))
