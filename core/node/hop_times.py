"""How long a hop's layers take: found once they are loaded, while nobody is served, and then by what serving shows."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence

import trio

from core.errors import CoreError
from core.interfaces.planner import CHUNK_ROWS
from core.node.report import StateReport
from core.node.state import Node
from core.protocol.messages import Run
from core.runtime.layer_costs import LayerCost
from core.runtime.layer_times import Times, by_kind, time_stage
from core.runtime.stage import Stage

NEAR = 1024
"""Positions up to which a row's time says what layers take: behind them attention is more and more of it."""
MIN_CHUNK_ROWS = 64
"""A shorter part of a prompt says little of a long one."""
_ROWS, _MIN_ROWS, _CHUNKS = 32, 8, 4
"""How many of the last batches count, and how many there must be."""
_TRIES, _REST_SECONDS = 60, 1.0
"""How often a node that serves is looked at again whether it is idle."""
_log = logging.getLogger(__name__)


class HopTimes:
    """Of the layers of one hop, which cost `costs`, and whose rows are so wide. What it finds is the node's to tell."""

    def __init__(self, node: Node, costs: Sequence[LayerCost], width: int) -> None:
        self._node = node
        self._costs = costs
        self._width = width
        self._rows = deque[float](maxlen=_ROWS)
        self._chunks = deque[float](maxlen=_CHUNKS)

    def note(self, batch: Run, seconds: float) -> None:
        """A batch was computed."""
        rows = sum(segment.rows for segment in batch.segments)
        if max(segment.position for segment in batch.segments) >= NEAR:
            return
        if rows == 1:
            self._rows.append(seconds)
        elif rows >= MIN_CHUNK_ROWS:
            self._chunks.append(seconds * CHUNK_ROWS / rows)

    def tell(self) -> None:
        """The node is about to say how long layers take: what serving has shown of these is among it."""
        row = statistics.median(self._rows) if len(self._rows) >= _MIN_ROWS else 0.0
        chunk = statistics.median(self._chunks) if self._chunks else 0.0
        if row or chunk:
            self._node.times.note(by_kind(Times(row, chunk), self._costs))

    async def find(self, stage: Stage, report: StateReport) -> None:
        """When the node is idle, unless serving shows it first. A stage that can not is found out when it serves."""
        for _ in range(_TRIES):
            try:
                found = await time_stage(self._node.compute, stage, self._width)
            except CoreError as error:
                _log.info("%s", error)
                return
            if found is not None:
                times = by_kind(found, self._costs)
                await trio.to_thread.run_sync(self._node.times.keep, times)
                self._node.times.find(times)
                report.changed()
                return
            await trio.sleep(_REST_SECONDS)
            if len(self._rows) >= _MIN_ROWS:
                return
