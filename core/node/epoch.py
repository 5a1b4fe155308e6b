"""One assignment from its arrival to its end: load the stage, join it to its neighbours, run batches in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

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
    ClearCache,
    ConnectPeer,
    HiddenState,
    InferenceError,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    NodeState,
    PeerConnected,
    PeerLost,
    Run,
    Tensor,
)
from core.protocol.tensors import from_wire, to_wire
from core.runtime.device import free_memory, torch_dtype
from core.runtime.stage import Stage

_INBOX = 1024
"""More batches than a coordinator ever has in flight."""
_STATE_SECONDS = 0.25
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
        self._put, self._inbox = trio.open_memory_channel[Packet](_INBOX)
        self._order, self._orders = trio.open_memory_channel[ConnectPeer](1)
        self._usage_changed = trio.Event()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self) -> None:
        """Returns when it is ended. Raises ChannelClosed where the coordinator is gone."""
        try:
            with self._scope:
                stage = await self._load()
                if stage is None:
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._report_usage, stage)
                    nursery.start_soon(self._run_batches, stage)
                    async for order in self._orders:
                        nursery.start_soon(self._take_from_upstream, order)
        finally:
            self._ended.set()

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    def put(self, packet: Packet) -> None:
        """Queues a batch or a CLEAR_CACHE. Raises ProtocolError for more than can be in flight."""
        try:
            self._put.send_nowait(packet)
        except trio.WouldBlock:
            raise ProtocolError(f"more than {_INBOX} batches are waiting") from None

    def connect_upstream(self, order: ConnectPeer) -> None:
        """Has the neighbour dialled that `order` names. Raises ProtocolError where that was asked for before."""
        try:
            self._order.send_nowait(order)
        except trio.WouldBlock:
            raise ProtocolError("a second CONNECT_PEER came") from None

    async def _take_from_upstream(self, order: ConnectPeer) -> None:
        try:
            async with dial_upstream(self._node.transport, order) as link:
                await self._control.send(PeerConnected(order.epoch, True, ""))
                await self._take_batches(link)
        except ChannelClosed as error:
            await self._control.send(PeerConnected(order.epoch, False, str(error)))

    async def _take_batches(self, link: Link) -> None:
        try:
            while True:
                packet = await link.receive()
                if not isinstance(packet.message, (Run, ClearCache)):
                    raise ProtocolError(f"the upstream node sent a {packet.message.TYPE}")
                if packet.message.epoch == self.assignment.epoch:
                    self.put(packet)
        except (ChannelClosed, ProtocolError) as error:
            await self.peer_lost("upstream", error)

    async def peer_lost(self, which: str, error: CoreError) -> None:
        await self._control.send(PeerLost(self.assignment.epoch, f"the link to the {which} node: {error}"))

    async def _load(self) -> Stage | None:
        activity, epoch = self._node.activity, self.assignment.epoch
        activity.become("loading", layers=self.layers)
        await self._control.send(nothing_cached(self._node))
        try:
            loaded = await self._load_in_thread()
        except CoreError as error:
            activity.become("error", str(error))
            await self._control.send(LoadFailed(epoch, str(error)[:4096]))
            return None
        await self._control.send(LoadComplete(epoch, loaded.stage.nbytes, loaded.read_bytes, loaded.seconds))
        activity.become("ready", layers=self.layers)
        return loaded.stage

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

        loader = StageLoader(self.assignment, node.plugins, node.device, node.cache_dir, report)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, reports)
                try:
                    return await self._compute(loader.load, node.holdings)
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

    async def _run_batches(self, stage: Stage) -> None:
        async for packet in self._inbox:
            await self._handle(packet, stage)

    async def _handle(self, packet: Packet, stage: Stage) -> None:
        message = packet.message
        if isinstance(message, ClearCache):
            await self._node.compute.run(stage.caches.clear, message.sessions)
            self._usage_changed.set()
            if not self.assignment.is_last:
                await self._hand_on(packet)
        elif isinstance(message, Run):
            await self._run_batch(packet, message, stage)

    async def _run_batch(self, packet: Packet, batch: Run, stage: Stage) -> None:
        last = self.assignment.is_last
        try:
            hidden, elapsed_us = await self._compute(_run_stage, stage, batch, self._wire, last)
        except CoreError as error:
            failure = InferenceError(
                batch.epoch, self._node.node_id, self.layers.start, self.layers.stop, str(error)[:4096]
            )
            await self._control.send(failure, packet.request_id)
            return
        self._usage_changed.set()
        compute_us = [*batch.compute_us, elapsed_us]
        if last:
            await self._control.send(HiddenState(batch.epoch, hidden, compute_us), packet.request_id)
        else:
            onward = msgspec.structs.replace(batch, hidden=hidden, compute_us=compute_us)
            await self._hand_on(Packet(onward, packet.request_id))

    async def _compute(self, call: Callable[..., T], *args: Any) -> T:
        """In the compute thread. Torch and plugins may raise anything there: one load or batch fails, not the node."""
        try:
            return await self._node.compute.run(call, *args)
        except CoreError:
            raise
        except Exception as error:
            _log.exception("layers [%d, %d) failed", self.layers.start, self.layers.stop)
            raise StageError(f"{type(error).__name__} on {self._node.device}", str(error)) from error

    async def _hand_on(self, packet: Packet) -> None:
        """To the next stage: over its own link, or by the coordinator. A lost neighbour is reported elsewhere."""
        if self.downstream is None:
            await self._control.send(packet.message, packet.request_id)
            return
        try:
            await self.downstream.send(packet.message, packet.request_id)
        except ChannelClosed:
            return

    async def _report_usage(self, stage: Stage) -> None:
        """Counts in the compute thread, which owns the caches, but not with every batch: there may be many."""
        while True:
            await self._usage_changed.wait()
            self._usage_changed = trio.Event()
            await self._control.send(await self._node.compute.run(_usage_of, stage))
            await trio.sleep(_STATE_SECONDS)


def nothing_cached(node: Node) -> NodeState:
    """What a node reports when it lets go of an epoch's caches."""
    return NodeState(sessions=0, kv_tokens=0, kv_bytes=0, free_memory=free_memory(node.device))


def _run_stage(stage: Stage, batch: Run, wire: torch.dtype, last: bool) -> tuple[Tensor, int]:
    started = time.perf_counter_ns()
    result = stage.run(from_wire(batch.hidden), batch.segments, outputs_only=last)
    hidden = to_wire(result, wire)
    return hidden, (time.perf_counter_ns() - started) // 1000


def _usage_of(stage: Stage) -> NodeState:
    return NodeState(len(stage.caches), stage.caches.tokens, stage.caches.nbytes, free_memory(stage.device))
