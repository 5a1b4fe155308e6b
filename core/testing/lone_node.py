"""A real node in one process, without sockets, and a coordinator that the test plays: for what a node does by itself.

async with lone_node() as node:
    coordinator = await node.met()
    await coordinator.assign(1, shard_of(model, range(2)))
    await coordinator.send(RunPrefill(1, [Segment(1, 0, 5, 1)], rows))
    assert (await coordinator.expect(HiddenState)).hop == 1
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.transport import Channel
from core.link import Link, first_message, open_link
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty
from core.plugins import PluginHost
from core.protocol.fields import Proof, Shard
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Hello,
    HelloAck,
    KeepLayers,
    LoadComplete,
    Message,
    NodeState,
    Release,
)
from core.runtime.manifest import Manifest
from core.runtime.model import Model, Precision
from core.testing.transport import LOOPBACK, MemoryTransport

DIAL_SECONDS = 60.0
TOKEN = bytes(range(16))
"""By which the neighbour of any hop shows that it is the one."""
M = TypeVar("M", bound=Message)


class PlayedCoordinator:
    """The test's end of a link to a node that has said `hello` and was welcomed."""

    def __init__(self, link: Link, hello: Hello) -> None:
        self.hello = hello
        self.heard: list[Message] = []
        """What came so far, but for heartbeats."""
        self.gone = trio.Event()
        self._link = link

    async def send(self, message: Message, request_id: str = "") -> None:
        await self._link.send(message, request_id)

    async def expect(self, kind: type[M]) -> M:
        """The next message of that kind; those before it are in `heard`."""
        while True:
            message = (await self._link.receive()).message
            self.heard.append(message)
            if isinstance(message, kind):
                return message

    async def assign(self, hop: int, shard: Shard, next_hop: int | None = None) -> LoadComplete:
        """Has the node be that hop, and waits until it is."""
        await self.send(Assignment(hop, next_hop, shard, "fp32", TOKEN))
        return await self.expect(LoadComplete)

    async def let_go(self, *hops: int) -> NodeState:
        """Ends `hops`, and has the node hold nothing else; what it says when that is so."""
        for hop in hops:
            await self.send(Release(hop))
        await self.send(KeepLayers([]))
        while (state := await self.expect(NodeState)).holdings:
            pass
        return state

    def leave(self) -> None:
        """Breaks the link off."""
        self.gone.set()


class LoneNode:
    """Made by `lone_node`."""

    def __init__(self) -> None:
        self.network = MemoryTransport()
        self.activity = Activity()
        self.duty = Duty()
        self.ended = trio.Event()
        self.dialled: list[float] = []
        """When it looked for its coordinator, by trio's clock."""
        self._away = False
        self._put, self._links = trio.open_memory_channel[PlayedCoordinator](1)

    async def met(self) -> PlayedCoordinator:
        """The coordinator that the node found."""
        return await self._links.receive()

    @contextmanager
    def away(self) -> Iterator[None]:
        """No coordinator answers while the block lasts."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    @asynccontextmanager
    async def neighbour(self, coordinator: PlayedCoordinator) -> AsyncIterator[Link]:
        """A link to the port where the node awaits its neighbours."""
        port = coordinator.hello.peer_port
        async with self.network.dial(LOOPBACK, port, timeout=DIAL_SECONDS) as channel, open_link(channel) as link:
            yield link

    async def _welcome(self, channel: Channel) -> None:
        self.dialled.append(trio.current_time())
        if self._away:
            return
        async with open_link(channel) as link:
            hello = await first_message(link)
            assert isinstance(hello, Hello), hello
            await link.send(HelloAck(PROTOCOL_VERSION))
            coordinator = PlayedCoordinator(link, hello)
            await self._put.send(coordinator)
            await coordinator.gone.wait()

    async def _run(self, settings: NodeSettings) -> None:
        plugins = PluginHost.installed()
        plugins.transports.add(self.network.name, self.network)
        await run_node(settings, plugins, self.activity, self.duty)
        self.ended.set()


@asynccontextmanager
async def lone_node(**settings: Any) -> AsyncIterator[LoneNode]:
    """`settings` are more of NodeSettings."""
    node = LoneNode()
    async with trio.open_nursery() as nursery:
        port = await nursery.start(node.network.listen, LOOPBACK, 0, node._welcome)
        asked = {"device": "cpu", "threads": 1, "transport": node.network.name, "cluster_port": port, **settings}
        nursery.start_soon(node._run, NodeSettings("alone", **asked))
        yield node
        nursery.cancel_scope.cancel()


def shard_of(path: Path, layers: range, **changes: Any) -> Shard:
    """What a coordinator would ask for of the checkpoint at `path`, in fp32; `changes` are other fields."""
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(path)), plugins) as model:
        proof = Manifest.of(model).proof(layers)
        fields = {
            "model_id": str(path),
            "revision": None,
            "architecture": model.architecture.name,
            "quant": "fp16",
            "compute_dtype": "fp32",
            "layer_start": layers.start,
            "layer_end": layers.stop,
            "weight_bytes": sum(model.layer_bytes(layer, precision) for layer in layers),
            "proof": Proof(proof.manifest, dict(proof.files), dict(proof.rests), list(proof.layers)),
            "parity_layer": layers.start,
        }
    return Shard(**{**fields, **changes})
