"""One hop from its assignment to its end: load the stage, join it to its neighbours, run batches in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import trio

from core.errors import ChannelClosed, CoreError, NoKVRoom, ProtocolError
from core.interfaces.dtypes import DType, KVDType
from core.link import Link
from core.node.batches import Done, HandOver, bytes_of, obey, rows_of, run_batch
from core.node.hop_times import HopTimes
from core.node.loading import Load, of_layers
from core.node.peers import dial_upstream
from core.node.report import StateReport
from core.node.stage_loader import Loaded, StageLoader
from core.node.state import Node
from core.protocol.codec import Packet
from core.protocol.fields import PeerLink, clipped
from core.protocol.messages import (
    Assignment,
    CacheCommand,
    ConnectPeer,
    InferenceError,
    Message,
    PeerConnected,
    PeerLost,
    Run,
)
from core.runtime.compute import Job
from core.runtime.device import torch_dtype
from core.runtime.stage import Stage

_INBOX = 1024
"""More batches than a coordinator ever has in flight."""
_INBOX_BYTES = 2**30
"""More bytes of hidden states than those have together."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    packet: Packet
    job: Job[Done]


class Hop:
    """`run` it in a task; `end` ends it. `downstream` is None while the coordinator relays.

    `state` is as an Activity's, and `changed` is called when it differs; `stage` is there while it serves.
    """

    def __init__(
        self, node: Node, control: Link, report: StateReport, assignment: Assignment, changed: Callable[[], None]
    ) -> None:
        self.assignment = assignment
        self.downstream: Link | None = None
        self.stage: Stage | None = None
        self.state, self.failure = "loading", ""
        self.model = assignment.shard.model_id
        self._node = node
        self._control = control
        self._report = report
        self._state_changed = changed
        self._load = Load(node, control, report, assignment.hop, assignment.shard)
        self.layers = self._load.layers
        self._times = HopTimes(node, (), 0)
        self._waiting_bytes = 0
        self._hand_over = HandOver()
        self._put, self._inbox = trio.open_memory_channel[_Work](_INBOX)
        self._order, self._orders = trio.open_memory_channel[ConnectPeer](1)
        self._scope = trio.CancelScope()
        self._downstream_scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self) -> None:
        """Returns when it is ended, or the stage could not be loaded. Raises ChannelClosed where the coordinator is
        gone."""
        try:
            with self._scope:
                self.failure = await self._load.run(self._load_stage, self._ready)
                if self.failure:
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._finish_work)
                    if self.stage is not None:
                        nursery.start_soon(self._times.find, self.stage, self._report)
                    async for order in self._orders:
                        nursery.start_soon(self._take_from_upstream, order)
        finally:
            self._abandon_work()
            self._load.end()
            self._ended.set()

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    def _load_stage(self, loader: StageLoader) -> Loaded:
        return loader.load(DType(self.assignment.wire_dtype), KVDType(self.assignment.kv_dtype))

    def _ready(self, loaded: Loaded) -> None:
        self.stage, self.state = loaded.stage, "ready"
        if loaded.stage is not None:
            loaded.stage.caches.bound(self._node.keeper.caches, loaded.session_cost)
        self._times = HopTimes(self._node, loaded.costs, loaded.width)
        self._state_changed()

    def put(self, packet: Packet) -> None:
        """Hands a batch or a cache command to the compute thread, behind those that came before.

        Raises ProtocolError for more than can be in flight, or for one that comes before the stage is loaded.
        """
        if self.stage is None:
            raise ProtocolError(f"a {packet.message.TYPE} came before the stage was loaded")
        if self._waiting_bytes + bytes_of(packet.message) > _INBOX_BYTES:
            raise ProtocolError(f"more than {_INBOX_BYTES} bytes of batches are waiting")
        try:
            self._put.send_nowait(_Work(packet, self._begin(packet, self.stage)))
        except trio.WouldBlock:
            raise ProtocolError(f"more than {_INBOX} batches are waiting") from None
        self._waiting_bytes += bytes_of(packet.message)

    def _begin(self, packet: Packet, stage: Stage) -> Job[Done]:
        message, compute, assignment = packet.message, self._node.compute, self.assignment
        if isinstance(message, CacheCommand):
            return compute.start(obey, stage, message, self._hand_over)
        assert isinstance(message, Run)
        wire, came = torch_dtype(DType(assignment.wire_dtype)), time.perf_counter_ns()
        told = wire, assignment, self._onward(), packet.request_id, self._hand_over
        return compute.start(run_batch, stage, message, came, *told)

    def _onward(self) -> Link:
        """Where this hop's results go: to the next one over its own link, or to the coordinator."""
        if self.assignment.next_hop is None or self.downstream is None:
            return self._control
        return self.downstream

    def connect_upstream(self, order: ConnectPeer) -> None:
        """Has the neighbour dialled that `order` names. Raises ProtocolError where that was asked for before."""
        try:
            self._order.send_nowait(order)
        except trio.WouldBlock:
            raise ProtocolError("a second CONNECT_PEER came") from None

    async def _take_from_upstream(self, order: ConnectPeer) -> None:
        try:
            async with dial_upstream(self._node.transport, self._node.identity, order) as link:
                await self._control.send(PeerConnected(order.hop, True, ""))
                await self._take_batches(link)
        except ChannelClosed as error:
            await self._control.send(PeerConnected(order.hop, False, clipped(error)))
        except Exception as error:
            _log.exception("the link to the upstream node of layers %s failed", self.layers)
            await self._peer_lost("upstream", ChannelClosed("it failed", f"{type(error).__name__}: {error}"))

    async def _take_batches(self, link: Link) -> None:
        try:
            while True:
                packet = await link.receive()
                if not isinstance(packet.message, (Run, CacheCommand)):
                    raise ProtocolError(f"the upstream node sent a {packet.message.TYPE}")
                if packet.message.hop == self.assignment.hop:
                    self.put(packet)
        except (ChannelClosed, ProtocolError) as error:
            await self._peer_lost("upstream", error)

    async def hand_on_over(self, link: Link) -> None:
        """Hands results on to the next hop over `link`, in place of any before, until it or this hop ends."""
        self._downstream_scope.cancel()
        self.downstream = link
        with trio.CancelScope() as self._downstream_scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_when_measured, link)
                try:
                    packet = await link.receive()
                    raise ProtocolError(f"the downstream node sent a {packet.message.TYPE}")
                except (ChannelClosed, ProtocolError) as error:
                    await self._peer_lost("downstream", error)
                nursery.cancel_scope.cancel()

    async def _tell_when_measured(self, link: Link) -> None:
        await link.measured.wait()
        self._report.changed()

    def tell_times(self) -> None:
        """Has the node know how long the layers take, as far as serving has shown it."""
        self._times.tell()

    @property
    def link_onward(self) -> PeerLink | None:
        """What was measured of the link to the next hop; None if nothing was, or there is none."""
        link = self.downstream
        if link is None or link.typical_round_trip is None:
            return None
        return PeerLink(self.assignment.hop, round(1e6 * link.typical_round_trip), round(link.bandwidth))

    async def _peer_lost(self, which: str, error: CoreError) -> None:
        reason = clipped(f"the link to the {which} node: {error.reason}")
        await self._control.send(PeerLost(self.assignment.hop, reason))

    async def _finish_work(self) -> None:
        """Takes what the compute thread has done, in order, and sends on what it could not send itself."""
        async for work in self._inbox:
            request_id = work.packet.request_id
            message = work.packet.message
            try:
                done = await of_layers(work.job, self.layers)
            except CoreError as error:
                refusal = InferenceError(self.assignment.hop, clipped(error), isinstance(error, NoKVRoom))
                await self._control.send(refusal, request_id)
                if isinstance(message, CacheCommand):
                    await self._hand_on(message, request_id)
                continue
            finally:
                self._waiting_bytes -= bytes_of(message)
            if isinstance(message, Run):
                self._times.note(message, done.seconds)
            self._report.changed()
            self._node.activity.tokens += rows_of(message)
            if not done.sent:
                await self._hand_on(done.message, request_id)

    async def _hand_on(self, message: Message, request_id: str) -> None:
        """To the next hop, or the coordinator, which needs no cache command back."""
        try:
            if not isinstance(message, CacheCommand):
                await self._send_on(message, request_id)
            elif self.assignment.next_hop is not None:
                await self._send_on(msgspec.structs.replace(message, hop=self.assignment.next_hop), request_id)
        finally:
            self._hand_over.handed += 1

    async def _send_on(self, message: Message, request_id: str) -> None:
        """A lost neighbour is reported elsewhere."""
        link = self._onward()
        try:
            await link.send(message, request_id)
        except ChannelClosed:
            if link is self._control:
                raise

    def _abandon_work(self) -> None:
        """The caches go behind the batch that computes now."""
        self._downstream_scope.cancel()
        self._put.close()
        try:
            while True:
                self._inbox.receive_nowait().job.abandon()
        except (trio.WouldBlock, trio.EndOfChannel):
            pass
        if self.stage is not None:
            self._node.compute.start(self.stage.caches.clear_all)
            self.stage = None
