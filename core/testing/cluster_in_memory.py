"""A cluster in one process, for logic tests: real coordinator, real nodes, no sockets, and faults on demand.

async with memory_cluster(tiny_checkpoint(tmp_path), "a", "b") as cluster:
    await cluster.ready()
    assert await cluster.text("Hello", max_tokens=8)
    cluster.machines["b"].sever()
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.coordinator.coordinator import Coordinator
from core.coordinator.settings import CoordinatorSettings
from core.errors import ChannelClosed, CoreError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.engine import ClusterStatus, GenerationRequest
from core.interfaces.transport import Channel, Credentials, Handler, Transport
from core.link import Link, first_message, open_link
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty
from core.plugins import PluginHost
from core.protocol.messages import PROTOCOL_VERSION, Hello, HelloAck
from core.testing.transport import LOOPBACK, MemoryChannel, MemoryTransport
from core.trust.cluster import Membership
from core.trust.identity import short_id
from core.trust.state_dir import StateDir

POLL_SECONDS = 0.005
WAIT_SECONDS = 150.0
JUMP_SECONDS = 0.25
FRIENDS_SECONDS = 300
HERE = "192.168.1.7"
"""Where a coordinator is that is open to friends; they are elsewhere."""
NODE_MEMORY = 64 * 2**20
"""What a node offers where the test does not say: a tiny model fits many times."""


class Machine(Transport):
    """One machine's place in a network: notes what it sends, and can be cut off from all others."""

    name: ClassVar[str] = MemoryTransport.name
    max_message: ClassVar[int] = MemoryTransport.max_message

    def __init__(self, network: MemoryTransport, host: str = LOOPBACK) -> None:
        self.host = host
        """Its own address: what the others see it come from."""
        self.sent: list[bytes] = []
        """Every message that left this machine, in order, whatever the connection."""
        self.port = 0
        """What it listens on: nodes, the neighbour in the route; the coordinator, all nodes."""
        self._network = network
        self._unplugged = False
        self._channels: set[_NotedChannel] = set()

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def serve(channel: Channel) -> None:
            with self._noted(channel) as noted:
                await handler(noted)

        noted = _PortNoted(self, task_status)
        await self._network.listen(host, port, serve, credentials=credentials, task_status=noted)

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> AsyncIterator[Channel]:
        if self._unplugged:
            await trio.sleep(timeout)
            raise ChannelClosed(f"no connection to {host}:{port}", "it timed out: nothing answered")
        async with self._network.dial(host, port, timeout=timeout, pin=pin, origin=self.host) as channel:
            with self._noted(channel) as noted:
                yield noted

    def sever(self) -> None:
        """Breaks all its connections at once, as when its process is killed. It can make new ones."""
        for channel in list(self._channels):
            channel.inner.close("it broke off without a goodbye")

    def unplug(self) -> None:
        """Lets all messages to and from it vanish from now on; nobody is told."""
        self._unplugged = True
        for channel in self._channels:
            channel.inner.stall()
        if self.port:
            self._network.stall(self.port)

    def _noted(self, channel: Channel) -> _NotedChannel:
        assert isinstance(channel, MemoryChannel)
        return _NotedChannel(channel, self.sent, self._channels)


class _NotedChannel(Channel):
    def __init__(self, inner: MemoryChannel, sent: list[bytes], open_ones: set[_NotedChannel]) -> None:
        self.inner = inner
        self.peer = inner.peer
        self.local_host = inner.local_host
        self.secure = inner.secure
        self._sent = sent
        self._open_ones = open_ones

    def __enter__(self) -> _NotedChannel:
        self._open_ones.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._open_ones.discard(self)

    async def send(self, data: bytes) -> None:
        self._sent.append(data)
        await self.inner.send(data)

    async def receive(self) -> bytes:
        return await self.inner.receive()

    async def aclose(self) -> None:
        await self.inner.aclose()


class _PortNoted(trio.TaskStatus[int]):
    def __init__(self, machine: Machine, told: trio.TaskStatus[int]) -> None:
        self._machine = machine
        self._told = told

    def started(self, value: int | None = None) -> None:
        assert value is not None
        self._machine.port = value
        self._told.started(value)


class RunningText:
    """A generation that goes on in a task of its own. `error` is what ended it early."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.ended = trio.Event()
        self.error: CoreError | None = None
        self._text = ""

    async def run(self, coordinator: Coordinator, request: GenerationRequest) -> None:
        try:
            async with coordinator.generate(request) as generation:
                async for delta in generation:
                    self._text += delta.text
                    self.begun.set()
        except CoreError as error:
            self.error = error
        finally:
            self.begun.set()
            self.ended.set()

    async def result(self) -> str:
        """The whole text once it is there. Raises what ended it early."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        return self._text


@dataclass(slots=True)
class MemoryCluster:
    """Made by `memory_cluster`."""

    coordinator: Coordinator
    network: MemoryTransport
    machine: Machine
    """The coordinator's own."""
    machines: dict[str, Machine] = field(default_factory=dict)
    """The nodes', by id; of nodes with one id the last."""
    _nursery: trio.Nursery | None = None
    duties: dict[str, Duty] = field(default_factory=dict)
    """By which nodes pause, resume and leave."""
    _scopes: dict[str, trio.CancelScope] = field(default_factory=dict)

    async def start_node(
        self,
        node_id: str,
        *,
        max_memory: int | None = NODE_MEMORY,
        machine: Machine | None = None,
        plugins: PluginHost | None = None,
        duty: Duty | None = None,
        membership: Membership | None = None,
        local_token: bytes | None = None,
    ) -> str:
        """Starts a node, and returns its id once it has joined.

        `machine` None: one with no faults of its own. `plugins` None: those that are installed. With a `membership`
        its id is `node_id` and a part of its key, unless the invite names it. `local_token` as in NodeSettings.
        """
        assert self._nursery is not None
        machine = self.machines[node_id] = machine or Machine(self.network)
        self._scopes[node_id] = trio.CancelScope()
        self.duties[node_id] = duty or Duty()
        settings = NodeSettings(
            node_id=node_id,
            membership=membership,
            cluster_port=self.coordinator.node_port,
            device="cpu",
            max_memory=max_memory,
            threads=1,
            local_token=local_token,
            transport=Machine.name,
        )
        self._nursery.start_soon(self._run_node, settings, plugins_on(machine, plugins))
        joined = f"{node_id}-{short_id(membership.identity.fingerprint)}" if membership else node_id
        await self.until(lambda status: any(node.node_id == joined for node in status.nodes))
        return joined

    def stop_node(self, node_id: str) -> None:
        """Ends a node for good: all its connections break off, and it makes no new ones."""
        self.machines[node_id].sever()
        self._scopes[node_id].cancel()

    async def until(
        self, condition: Callable[[ClusterStatus], bool], *, timeout: float = WAIT_SECONDS
    ) -> ClusterStatus:
        """The first status that meets `condition`. Raises AssertionError with the last one where none does in time."""
        deadline = trio.current_time() + timeout
        while not condition(status := self.coordinator.status()):
            if trio.current_time() > deadline:
                raise AssertionError(f"not what was waited for within {timeout:g} s: {status}")
            await trio.sleep(POLL_SECONDS)
        return status

    async def ready(self, *, after_epoch: int = 0) -> ClusterStatus:
        """The status once a route later than `after_epoch` serves."""
        return await self.until(lambda status: status.state == "ready" and status.route_epoch > after_epoch)

    async def text(self, prompt: str | tuple[int, ...], max_tokens: int) -> str:
        """A greedy completion."""
        request = GenerationRequest(prompt, max_tokens=max_tokens, temperature=0)
        async with self.coordinator.generate(request) as generation:
            return "".join([delta.text async for delta in generation])

    @asynccontextmanager
    async def generating(self, prompt: str | tuple[int, ...], max_tokens: int) -> AsyncIterator[RunningText]:
        """A greedy completion of which the first token has come when the block begins, and which goes on in it."""
        request = GenerationRequest(prompt, max_tokens=max_tokens, temperature=0)
        running = RunningText()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.run, self.coordinator, request)
            await running.begun.wait()
            yield running
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def join(self, node_id: str, **hello: Any) -> AsyncIterator[Link]:
        """A member that the test plays itself: it has been welcomed. `hello` are more of HELLO's fields."""
        offer = Hello(**{"protocol": PROTOCOL_VERSION, "node_id": node_id, "free_memory": 0, **hello})
        async with self.dial() as link:
            await link.send(offer)
            welcome = await first_message(link)
            assert isinstance(welcome, HelloAck), welcome
            yield link

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Link]:
        """A link to the coordinator, before any message."""
        port = self.coordinator.node_port
        async with self.network.dial(LOOPBACK, port, timeout=WAIT_SECONDS) as channel, open_link(channel) as link:
            yield link

    async def _run_node(self, settings: NodeSettings, plugins: PluginHost) -> None:
        with self._scopes[settings.node_id]:
            await run_node(settings, plugins, Activity(), self.duties[settings.node_id])


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Lets `seconds` of a clock pass in little jumps, each with all that follows from it but what threads compute.

    So wait first for what threads are at: a load that takes 50 ms of yours can take minutes of this clock.
    """
    for _ in range(math.ceil(seconds / JUMP_SECONDS)):
        clock.jump(JUMP_SECONDS)
        await wait_all_tasks_blocked()


def plugins_on(machine: Machine, plugins: PluginHost | None = None) -> PluginHost:
    """`plugins`, or all that are installed, with `machine` as the transport "memory"."""
    plugins = plugins or PluginHost.installed()
    plugins.transports.add(machine.name, machine)
    return plugins


@asynccontextmanager
async def memory_cluster(
    model: Path, *node_ids: str, dtype: DType = DType.FP32, plugins: PluginHost | None = None, **settings: Any
) -> AsyncIterator[MemoryCluster]:
    """A coordinator that serves `model`, and nodes, for the length of the block.

    `plugins` are the coordinator's; None: those that are installed. `settings` are more of `CoordinatorSettings`;
    without `min_nodes`, each of the nodes gets layers. Unless they are to be rebalanced, layers stay where they are:
    what is measured on a busy machine would move them. It need not be ready yet: see `MemoryCluster.ready`.
    """
    network = MemoryTransport()
    machine = Machine(network)
    asked = CoordinatorSettings(
        source=Source(str(model)),
        served_model_name="tiny",
        node_port=0,
        dtype=dtype,
        device="cpu",
        threads=1,
        transport=machine.name,
        **{"min_nodes": max(1, len(node_ids)), "rebalance": False, **settings},
    )
    coordinator = Coordinator(asked, plugins=plugins_on(machine, plugins))
    async with trio.open_nursery() as nursery:
        await nursery.start(coordinator.run)
        cluster = MemoryCluster(coordinator, network, machine, _nursery=nursery)
        for node_id in node_ids:
            await cluster.start_node(node_id)
        yield cluster
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_to_friends(model: Path, state: StateDir, **settings: Any) -> AsyncIterator[MemoryCluster]:
    """A cluster at `HERE` for machines elsewhere: its key and register are kept in `state`. Given up in the end."""
    friendly: dict[str, Any] = {"node_host": "0.0.0.0", "state_dir": state.path, "advertise": (HERE,)}
    with trio.fail_after(FRIENDS_SECONDS):
        async with memory_cluster(model, **friendly, **settings) as cluster:
            yield cluster
