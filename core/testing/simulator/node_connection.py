"""A simulated node's time with its coordinator: it obeys as core.node does, and sleeps where that computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import trio

from core.errors import ChannelClosed, CoreError, ProtocolError
from core.interfaces.transport import Channel
from core.link import Link, first_message
from core.node.peers import accept_downstream, dial_upstream
from core.protocol.codec import Packet
from core.protocol.fields import Holding, Segment, Shard, clipped
from core.protocol.messages import (
    Assignment,
    CacheCommand,
    ClearCache,
    ConnectPeer,
    CopyCache,
    Error,
    HelloAck,
    HiddenState,
    InferenceError,
    KeepLayers,
    Leave,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    Message,
    NodeState,
    Pause,
    PeerConnected,
    PeerLost,
    Release,
    Run,
    StandBy,
)
from core.testing.simulator.model import without_values
from core.testing.transport import LOOPBACK

if TYPE_CHECKING:
    from core.testing.simulator.node import SimulatedNode

PROGRESS_SECONDS = 1.0
LEAVE_SECONDS = 35.0
_QUEUE = 4096


@dataclass(slots=True, eq=False)
class _Hop:
    """Layers that the node is to hold: for a route, or to stand in. `caches` are the tokens of each session."""

    order: Assignment | StandBy
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_ready: bool = False
    downstream: Link | None = None
    downstream_scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    caches: dict[int, int] = field(default_factory=dict)
    upstream: trio.Event = field(default_factory=trio.Event)
    connect: ConnectPeer | None = None

    @property
    def layers(self) -> range:
        return range(self.order.shard.layer_start, self.order.shard.layer_end)

    @property
    def next_hop(self) -> int | None:
        return self.order.next_hop if isinstance(self.order, Assignment) else None

    def end(self) -> None:
        self.is_ready = False
        self.scope.cancel()
        self.downstream_scope.cancel()

    def gap(self, segment: Segment) -> str:
        cached = self.caches.get(segment.session, 0)
        return f"position {segment.position} behind {cached} cached tokens" if segment.position > cached else ""

    def obey(self, command: CacheCommand) -> None:
        if isinstance(command, CopyCache):
            self.caches[command.target] = min(command.length, self.caches.get(command.source, 0))
        elif isinstance(command, ClearCache):
            for session in command.sessions:
                self.caches.pop(session, None)


@dataclass(frozen=True, slots=True)
class _Work:
    hop: _Hop
    packet: Packet
    came: float


class NodeConnection:
    """`run` returns when the node has left. Raises ChannelClosed when the coordinator goes."""

    def __init__(self, node: SimulatedNode, control: Link) -> None:
        self._node = node
        self._control = control
        self._hops: dict[int, _Hop] = {}
        self._kind: Shard | None = None
        """Of what model the held layers are."""
        self._put, self._work = trio.open_memory_channel[_Work](_QUEUE)
        self._post, self._outbox = trio.open_memory_channel[tuple[Link, Message, str]](_QUEUE)
        self._unsent = 0
        self._let_go = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            peer_port: int = await nursery.start(self._node.transport.listen, LOOPBACK, 0, self._accept_peer)
            await self._control.send(self._node.hello(peer_port))
            answer = await first_message(self._control)
            if not isinstance(answer, HelloAck):
                raise ProtocolError(f"the coordinator answered HELLO with a {answer.TYPE}")
            nursery.start_soon(self._compute)
            nursery.start_soon(self._send)
            try:
                while True:
                    await self._obey(await self._control.receive(), nursery)
            except ChannelClosed:
                if not self._node.leaving:
                    raise
            nursery.cancel_scope.cancel()

    def tell_pause(self) -> None:
        self._control.try_send(Pause(self._node.paused, leaves=self._node.leaving))

    async def _obey(self, packet: Packet, nursery: trio.Nursery) -> None:
        message = packet.message
        if isinstance(message, (Run, CacheCommand)):
            self._take(packet)
        elif isinstance(message, (Assignment, StandBy)):
            self._hops[message.hop] = hop = _Hop(message)
            nursery.start_soon(self._be, hop)
        elif isinstance(message, ConnectPeer):
            if (found := self._hops.get(message.hop)) is not None:
                found.connect = message
                found.upstream.set()
        elif isinstance(message, Release):
            if (found := self._hops.pop(message.hop, None)) is not None:
                found.end()
            await self._tell()
        elif isinstance(message, KeepLayers):
            named = {layer for one in message.holdings for span in one.layers for layer in range(span.start, span.end)}
            self._node.keep(named, self._used())
            await self._tell()
            if self._node.leaving and not self._hops:
                await self._control.end_with(Leave(self._node.paused))
        elif isinstance(message, (Error, Leave)):
            raise ChannelClosed("the coordinator ended the link", str(message))

    def _take(self, packet: Packet) -> None:
        message = packet.message
        assert isinstance(message, (Run, CacheCommand))
        hop = self._hops.get(message.hop)
        if hop is not None and hop.is_ready:
            self._put.send_nowait(_Work(hop, packet, trio.current_time()))

    async def _be(self, hop: _Hop) -> None:
        """The hop, from its load to its end. What stands in is none once it is loaded: its layers may make room."""
        with hop.scope:
            hop.is_ready = await self._load(hop)
            if isinstance(hop.order, StandBy):
                del self._hops[hop.order.hop]
                return
            await hop.upstream.wait()
            assert hop.connect is not None
            await self._take_from_upstream(hop, hop.connect)

    async def _load(self, hop: _Hop) -> bool:
        node, shard, number = self._node, hop.order.shard, hop.order.hop
        async with node.loads:
            self._kind = shard
            began = trio.current_time()
            missing = len(set(hop.layers) - node.held)
            fits = node.make_room(missing, self._used())
            nbytes, seconds = missing * node.layer_bytes, node.load_seconds(missing)
            while fits and (left := began + seconds - trio.current_time()) > 0:
                await self._control.send(LoadProgress(number, "load", round(nbytes * (1 - left / seconds)), nbytes))
                await trio.sleep(min(left, PROGRESS_SECONDS))
            if fits:
                node.held.update(hop.layers)
        if fits and isinstance(hop.order, StandBy):
            node.named.update(hop.layers)
        await self._tell()
        if not fits:
            await self._control.send(LoadFailed(number, f"{missing} layers do not fit"))
            return False
        parity, took = dict(node.parity), trio.current_time() - began
        await self._control.send(LoadComplete(number, len(hop.layers) * node.layer_bytes, nbytes, took, parity))
        return True

    def _used(self) -> set[int]:
        return {layer for hop in self._hops.values() for layer in hop.layers}

    async def _tell(self) -> None:
        node, kind = self._node, self._kind
        spans = node.spans()
        holdings = [Holding(kind.proof.manifest, kind.quant, kind.compute_dtype, spans)] if kind and spans else []
        caches = [tokens for hop in self._hops.values() for tokens in hop.caches.values()]
        await self._control.send(NodeState(len(caches), sum(caches), 0, node.kv_room, node.kv_room, holdings))

    async def _compute(self) -> None:
        """Batches one after another, as they came."""
        node = self._node
        async for work in self._work:
            hop, message = work.hop, work.packet.message
            if isinstance(message, CacheCommand):
                hop.obey(message)
                if hop.next_hop is not None:
                    self._hand_on(hop, msgspec.structs.replace(message, hop=hop.next_hop), "")
                continue
            assert isinstance(message, Run)
            if gap := next(filter(None, map(hop.gap, message.segments)), ""):
                self._say(self._control, InferenceError(hop.order.hop, gap), work.packet.request_id)
                continue
            began, seconds = trio.current_time(), node.compute_seconds(len(hop.layers), message.segments)
            await trio.sleep(seconds)
            node.busy += seconds
            for segment in message.segments:
                hop.caches[segment.session] = segment.position + segment.rows
            if hop.is_ready:
                self._hand_on(hop, _result(hop, message, began - work.came, seconds), work.packet.request_id)

    def _hand_on(self, hop: _Hop, message: Message, request_id: str) -> None:
        to_next = hop.next_hop is not None and hop.downstream is not None
        self._say(hop.downstream if to_next and hop.downstream else self._control, message, request_id)

    def _say(self, link: Link, message: Message, request_id: str) -> None:
        """At once, or behind what waits to be sent."""
        if self._unsent or not link.send_now(message, request_id):
            self._unsent += 1
            self._post.send_nowait((link, message, request_id))

    async def _send(self) -> None:
        async for link, message, request_id in self._outbox:
            try:
                await link.send(message, request_id)
            except ChannelClosed:
                if link is self._control:
                    raise
            self._unsent -= 1

    async def _take_from_upstream(self, hop: _Hop, order: ConnectPeer) -> None:
        try:
            async with dial_upstream(self._node.transport, self._node.identity, order) as link:
                await self._control.send(PeerConnected(order.hop, True, ""))
                try:
                    while True:
                        self._take(await link.receive())
                except ChannelClosed as error:
                    await self._control.send(PeerLost(order.hop, clipped(error)))
        except ChannelClosed as error:
            await self._control.send(PeerConnected(order.hop, False, clipped(error)))

    async def _accept_peer(self, channel: Channel) -> None:
        async with accept_downstream(channel, self._assignment, self._node.identity) as (link, assignment):
            hop = self._hops.get(assignment.hop)
            if hop is None:
                return
            hop.downstream = link
            with hop.downstream_scope:
                try:
                    await link.receive()
                except CoreError as error:
                    await self._control.send(PeerLost(assignment.hop, clipped(error)))

    def _assignment(self, number: int) -> Assignment | None:
        hop = self._hops.get(number)
        return hop.order if hop is not None and isinstance(hop.order, Assignment) else None


def _result(hop: _Hop, batch: Run, waited: float, seconds: float) -> Message:
    compute_us, queue_us = [*batch.compute_us, round(seconds * 1e6)], [*batch.queue_us, round(waited * 1e6)]
    if hop.next_hop is None:
        wanted = sum(segment.outputs for segment in batch.segments)
        return HiddenState(hop.order.hop, without_values(wanted, batch.hidden.width), compute_us, queue_us)
    return msgspec.structs.replace(batch, hop=hop.next_hop, compute_us=compute_us, queue_us=queue_us)
