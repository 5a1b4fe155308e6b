"""Loads for a hop, or for one that may come: in a thread of their own, one at a time, while other hops compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from core.errors import CoreError, StageError, sole_error
from core.link import Link
from core.node.report import StateReport
from core.node.stage_loader import Loaded, StageLoader
from core.node.state import Node
from core.protocol.fields import Shard, clipped
from core.protocol.messages import LoadComplete, LoadFailed, LoadProgress, StandBy
from core.runtime.compute import Job, explained

_REPORTS = 64
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Load:
    """One shard's, from the order to its answer. The layers count as used from its making until `end`."""

    def __init__(self, node: Node, control: Link, report: StateReport, hop: int, shard: Shard) -> None:
        self.layers = range(shard.layer_start, shard.layer_end)
        self.hop = hop
        self._node = node
        self._control = control
        self._report = report
        self._token = trio.lowlevel.current_trio_token()
        self._put, self._reports = trio.open_memory_channel[LoadProgress](_REPORTS)
        self._loader = StageLoader(
            shard, node.plugins, node.device, node.cache_dir, node.keeper, self._progressed, compiles=node.compiles
        )
        self.variant = self._loader.variant
        node.keeper.use(hop, self.variant, self.layers)

    def end(self) -> None:
        """Nobody uses its layers now."""
        self._node.keeper.release(self.hop)

    async def run(self, verb: Callable[[StageLoader], Loaded], ready: Callable[[Loaded], None]) -> str:
        """Does what `verb` has the loader do, and tells the coordinator how it went; `ready` is called before that.

        Returns why it failed; empty where it did not. Where it is cancelled, nothing that it read stays.
        """
        try:
            loaded = await self._in_thread(verb)
        except CoreError as error:
            await self._report.tell(layers_changed=True)
            await self._control.send(LoadFailed(self.hop, clipped(error)))
            return str(error)
        ready(loaded)
        if loaded.files:
            note = self._node.disk.note
            await trio.to_thread.run_sync(note, self.variant.manifest, loaded.files, loaded.read_bytes, loaded.reading)
        await self._report.tell(layers_changed=True)
        done = LoadComplete(self.hop, loaded.weight_bytes, loaded.read_bytes, loaded.seconds, loaded.parity)
        await self._control.send(done)
        return ""

    async def _in_thread(self, verb: Callable[[StageLoader], Loaded]) -> Loaded:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward)
                try:
                    return await of_layers(self._node.loads.start(verb, self._loader), self.layers)
                except trio.Cancelled:
                    self._loader.abort()
                    raise
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None

    def _progressed(self, phase: str, done: int, total: int) -> None:
        """In the thread that loads."""
        self._token.run_sync_soon(self._note, LoadProgress(self.hop, phase, done, total))

    def _note(self, progress: LoadProgress) -> None:
        try:
            self._put.send_nowait(progress)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return
        if self._node.activity.state == "loading":
            self._node.activity.advance(progress.phase, progress.done, progress.total)

    async def _forward(self) -> None:
        async with self._reports:
            async for progress in self._reports:
                await self._control.send(progress)


class Preparation:
    """A STAND_BY. `run` it in a task; `end` calls it off. `state` is as an Activity's."""

    def __init__(self, node: Node, control: Link, report: StateReport, order: StandBy) -> None:
        self.state, self.failure = "loading", ""
        self.model = order.shard.model_id
        self._keeper = node.keeper
        self._load = Load(node, control, report, order.hop, order.shard)
        self._in_memory = order.in_memory
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.layers = self._load.layers

    async def run(self) -> None:
        verb = StageLoader.hold if self._in_memory else StageLoader.fetch
        try:
            with self._scope:
                self.failure = await self._load.run(verb, self._ready)
        finally:
            self._load.end()
            self._ended.set()

    def _ready(self, _: Loaded) -> None:
        if self._in_memory:
            self._keeper.name(self._load.variant, self.layers)

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


async def of_layers(job: Job[T], layers: range) -> T:
    """The job's result: what fails in it fails one load or batch of `layers`, not the node."""
    span = f"layers [{layers.start}, {layers.stop})"
    return await explained(
        job, f"{span} failed", lambda error: StageError(f"{span}: {type(error).__name__}", str(error))
    )
