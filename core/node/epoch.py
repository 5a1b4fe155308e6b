"""One assignment from its arrival to its end: load the stage, join it to its neighbours, run batches in order."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import trio

from core.errors import ChannelClosed, CoreError, ProtocolError, StageError, sole_error
from core.interfaces.dtypes import DType
from core.link import Link
from core.node.peers import dial_upstream
from core.node.stage_loader import LoadedStage, StageLoader
from core.node.state import Node
from core.protocol.codec import Packet
from core.protocol.messages import (
    Assignment,
    CacheOrder,
    ClearCache,
    ConnectPeer,
    CopyCache,
    HiddenState,
    InferenceError,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    Message,
    NodeState,
    PeerConnected,
    PeerLost,
    Run,
    RunDecode,
    clipped,
)
from core.protocol.tensors import from_wire, to_wire
from core.runtime.compute import Job
from core.runtime.device import free_memory, torch_dtype
from core.runtime.stage import Stage

_INBOX = 1024
"""More batches than a coordinator ever has in flight."""
_STATE_SECONDS = 0.25
KV_SHARE = 0.9
"""Of the memory that is free once a stage is loaded, for KV caches: batches need room as well."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Epoch:
    """`run` it in a task; `end` it before the next one begins. `downstream` is None while the coordinator relays."""

    def __init__(self, node: Node, control: Link, assignment: Assignment) -> None:
        self.assignment = assignment
        self.downstream: Link | None = None
        self.layers = range(assignment.layer_start, assignment.layer_end_exclusive)
        self._node = node
        self._control = control
        self._wire = torch_dtype(DType(assignment.wire_dtype))
        self._put, self._inbox = trio.open_memory_channel[_Work](_INBOX)
        self._stage: Stage | None = None
        self._order, self._orders = trio.open_memory_channel[ConnectPeer](1)
        self._usage_changed = trio.Event()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self) -> None:
        """Returns when it is ended. Raises ChannelClosed where the coordinator is gone."""
        try:
            with self._scope:
                stage = self._stage = await self._load()
                if stage is None:
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._report_usage, stage)
                    nursery.start_soon(self._finish_work)
                    async for order in self._orders:
                        nursery.start_soon(self._take_from_upstream, order)
        finally:
            self._abandon_work()
            self._stage = None  # the link to the next stage outlives this epoch, and keeps it
            self._ended.set()

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    def put(self, packet: Packet) -> None:
        """Hands a batch or a CLEAR_CACHE to the compute thread, behind those that came before.

        Raises ProtocolError for more than can be in flight, or for one that comes before the stage is loaded.
        """
        if self._stage is None:
            raise ProtocolError(f"a {packet.message.TYPE} came before the stage was loaded")
        try:
            self._put.send_nowait(self._begin(packet, self._stage))
        except trio.WouldBlock:
            raise ProtocolError(f"more than {_INBOX} batches are waiting") from None

    def _begin(self, packet: Packet, stage: Stage) -> _Work:
        message, compute = packet.message, self._node.compute
        if isinstance(message, CacheOrder):
            return _Work(packet, compute.start(_obey, stage, message))
        assert isinstance(message, Run)
        last, link = self.assignment.is_last, self._onward()
        came = time.perf_counter_ns()
        return _Work(packet, compute.start(_run_stage, stage, message, came, self._wire, last, link, packet.request_id))

    def _onward(self) -> Link:
        """Where this stage's results go: to the next stage over its own link, or to the coordinator."""
        if self.assignment.is_last or self.downstream is None:
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
                await self._control.send(PeerConnected(order.epoch, True, ""))
                await self._take_batches(link)
        except ChannelClosed as error:
            await self._control.send(PeerConnected(order.epoch, False, clipped(error)))

    async def _take_batches(self, link: Link) -> None:
        try:
            while True:
                packet = await link.receive()
                if not isinstance(packet.message, (Run, CacheOrder)):
                    raise ProtocolError(f"the upstream node sent a {packet.message.TYPE}")
                if packet.message.epoch == self.assignment.epoch:
                    self.put(packet)
        except (ChannelClosed, ProtocolError) as error:
            await self.peer_lost("upstream", error)

    async def peer_lost(self, which: str, error: CoreError) -> None:
        await self._control.send(
            PeerLost(self.assignment.epoch, clipped(f"the link to the {which} node: {error.reason}"))
        )

    async def _load(self) -> Stage | None:
        activity, epoch = self._node.activity, self.assignment.epoch
        activity.model = self.assignment.model_id
        activity.become("loading", layers=self.layers)
        await self._control.send(nothing_cached(self._node))
        try:
            loaded = await self._load_in_thread()
        except CoreError as error:
            activity.become("error", str(error))
            await self._control.send(LoadFailed(epoch, clipped(error)))
            return None
        kv_tokens = self._kv_tokens(loaded.stage)
        done = LoadComplete(epoch, loaded.stage.nbytes, loaded.read_bytes, kv_tokens, loaded.seconds, loaded.parity)
        await self._control.send(done)
        activity.weight_bytes = loaded.stage.nbytes
        activity.become("ready", layers=self.layers)
        return loaded.stage

    def _kv_tokens(self, stage: Stage) -> int:
        """How many tokens' KV caches fit beside the stage: into the user's own cap, or most of what is free.

        Layers that cache nothing per token, as Mamba's, take any number.
        """
        free, cap = free_memory(self._node.device), self._node.max_memory
        room = free * KV_SHARE if cap is None else min(free, max(0, cap - stage.nbytes))
        return int(room) // max(1, stage.kv_token_bytes)

    async def _load_in_thread(self) -> LoadedStage:
        node, token = self._node, trio.lowlevel.current_trio_token()
        put, reports = trio.open_memory_channel[LoadProgress](64)

        def note(progress: LoadProgress) -> None:
            node.activity.advance(progress.phase, progress.done, progress.total)
            try:
                put.send_nowait(progress)
            except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
                return

        def report(phase: str, done: int, total: int) -> None:
            token.run_sync_soon(note, LoadProgress(self.assignment.epoch, phase, done, total))

        loader = StageLoader(self.assignment, node.plugins, node.device, node.cache_dir, report, compiles=node.compiles)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, reports)
                try:
                    return await self._explained(node.compute.start(loader.load, node.holdings))
                except trio.Cancelled:
                    loader.abort()
                    raise
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None

    async def _forward(self, reports: trio.MemoryReceiveChannel[LoadProgress]) -> None:
        async for progress in reports:
            await self._control.send(progress)

    async def _finish_work(self) -> None:
        """Takes what the compute thread has done, in order, and sends on what it could not send itself."""
        async for work in self._inbox:
            try:
                done = await self._explained(work.job)
            except CoreError as error:
                failure = InferenceError(self.assignment.epoch, clipped(error))
                await self._control.send(failure, work.packet.request_id)
                continue
            self._usage_changed.set()
            self._node.activity.tokens += rows_of(work.packet.message)
            if not done.sent:
                await self._hand_on(done.message, work.packet.request_id)

    def _abandon_work(self) -> None:
        self._put.close()
        try:
            while True:
                self._inbox.receive_nowait().job.abandon()
        except (trio.WouldBlock, trio.EndOfChannel):
            return

    async def _explained(self, job: Job[T]) -> T:
        """The job's result. Torch and plugins may raise anything in it: one load or batch fails, not the node."""
        try:
            return await job.wait()
        except CoreError:
            raise
        except Exception as error:
            _log.exception("layers [%d, %d) failed", self.layers.start, self.layers.stop)
            raise StageError(f"{type(error).__name__} on {self._node.device}", str(error)) from error

    async def _hand_on(self, message: Message, request_id: str) -> None:
        """A lost neighbour is reported elsewhere."""
        if isinstance(message, CacheOrder) and self.assignment.is_last:
            return
        link = self._onward()
        try:
            await link.send(message, request_id)
        except ChannelClosed:
            if link is self._control:
                raise

    async def _report_usage(self, stage: Stage) -> None:
        """Counts in the compute thread, which owns the caches, but not with every batch: there may be many."""
        while True:
            await self._usage_changed.wait()
            self._usage_changed = trio.Event()
            usage = await self._node.compute.run(_usage_of, stage)
            self._node.activity.kv_bytes = usage.kv_bytes
            await self._control.send(usage)
            await trio.sleep(_STATE_SECONDS)


def rows_of(message: Message) -> int:
    """Tokens that a message moves through the layers."""
    return sum(segment.rows for segment in message.segments) if isinstance(message, Run) else 0


def nothing_cached(node: Node) -> NodeState:
    """What a node reports when it lets go of an epoch's caches."""
    return NodeState(sessions=0, kv_tokens=0, kv_bytes=0, free_memory=free_memory(node.device))


@dataclass(frozen=True, slots=True)
class _Done:
    """What is to go on to the next stage or the coordinator, and whether the compute thread sent it already."""

    message: Message
    sent: bool


@dataclass(frozen=True, slots=True)
class _Work:
    packet: Packet
    job: Job[_Done]


def _run_stage(
    stage: Stage, batch: Run, came: int, wire: torch.dtype, last: bool, link: Link, request_id: str
) -> _Done:
    started = time.perf_counter_ns()
    queue_us = [*batch.queue_us, (started - came) // 1000]
    result = stage.run(from_wire(batch.hidden), batch.segments, outputs_only=last)
    hidden = to_wire(result, wire)
    compute_us = [*batch.compute_us, (time.perf_counter_ns() - started) // 1000]
    message: Message
    if last:
        message = HiddenState(batch.epoch, hidden, compute_us, queue_us)
    else:
        message = msgspec.structs.replace(batch, hidden=hidden, compute_us=compute_us, queue_us=queue_us)
    # A prompt's chunks keep their order: one that is too large to be sent here must not be overtaken by the next.
    in_turn = last or isinstance(batch, RunDecode)
    return _Done(message, in_turn and link.send_now(message, request_id))


def _obey(stage: Stage, order: CacheOrder) -> _Done:
    sent = False
    if isinstance(order, CopyCache):
        stage.caches.copy(order.source, order.target, order.length)
    elif isinstance(order, ClearCache) and order.sessions:
        stage.caches.clear(order.sessions)
    else:
        stage.caches.clear_all()
        sent = True
    return _Done(order, sent)


def _usage_of(stage: Stage) -> NodeState:
    return NodeState(len(stage.caches), stage.caches.tokens, stage.caches.nbytes, free_memory(stage.device))
