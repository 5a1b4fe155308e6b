"""A simulated node's process: what it holds, how long it computes, and a coordinator that it stays connected to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import trio

from core.errors import ChannelClosed, sole_error
from core.interfaces.planner import CHUNK_ROWS
from core.interfaces.transport import Transport
from core.link import open_link
from core.protocol.fields import Segment, Span
from core.protocol.messages import PROTOCOL_VERSION, Hello
from core.testing.simulator.description import Machine
from core.testing.simulator.node_connection import NodeConnection
from core.testing.transport import LOOPBACK
from core.trust.identity import Identity

DIAL_SECONDS = 5.0
RETURN_SECONDS = 1.0
"""After which it looks for a coordinator again that it has lost."""


@dataclass(slots=True, eq=False)
class SimulatedNode:
    """`layer_bytes` are those of each layer, `parity` what it answers to the coordinator's comparison.

    `random` draws how much longer a batch takes, and `factor` says how much longer than described all of them do.
    `busy` counts the seconds that it computed.
    """

    name: str
    machine: Machine
    layer_bytes: int
    transport: Transport
    identity: Identity
    parity: Mapping[str, bytes]
    random: Random
    busy: float = 0.0
    factor: float = 1.0
    paused: str = ""
    leaving: bool = False
    held: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    """Of those which are held, the ones that are to stay though no hop uses them."""
    loads: trio.Lock = field(default_factory=trio.Lock)
    """It loads for one hop at a time."""
    _connection: NodeConnection | None = None
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def run(self, port: int) -> None:
        """Until it ends, or has left."""
        self.held.clear()
        self.named.clear()
        self.paused, self.leaving = "", False
        with trio.CancelScope() as self._scope:
            while not self.leaving:
                try:
                    await self._one_connection(port)
                except ChannelClosed:
                    await trio.sleep(RETURN_SECONDS)

    def end(self) -> None:
        """At once."""
        self._scope.cancel()

    def pause(self, reason: str, *, leaves: bool = False) -> None:
        """Or ends the pause, if there is no reason."""
        self.paused, self.leaving = reason, leaves
        if self._connection is not None:
            self._connection.tell_pause()

    @property
    def memory(self) -> int:
        return round(self.machine.memory_gb * 1e9)

    @property
    def kv_room(self) -> int:
        return max(0, self.memory - len(self.held) * self.layer_bytes)

    def compute_seconds(self, layers: int, segments: Sequence[Segment]) -> float:
        rows = sum(segment.rows for segment in segments)
        context = sum(segment.rows * segment.position for segment in segments)
        cached = sum(segment.position for segment in segments)
        factor = self.factor * self.random.choice(self.machine.scatter)
        return factor * layers * self.machine.layer_seconds(rows, context, cached)

    def load_seconds(self, layers: int) -> float:
        return layers * self.layer_bytes / (self.machine.load_mb_per_s * 1e6)

    def make_room(self, layers: int, used: Collection[int]) -> bool:
        """Lets go of layers that are not `used`, those that nobody named first. False if so many still do not fit."""
        unused = sorted(self.held.difference(used), key=lambda layer: (layer in self.named, layer))
        while unused and (len(self.held) + layers) * self.layer_bytes > self.memory:
            self.held.discard(unused.pop(0))
        return (len(self.held) + layers) * self.layer_bytes <= self.memory

    def keep(self, named: Collection[int], used: Collection[int]) -> None:
        self.named = set(named)
        self.held &= self.named.union(used)

    def spans(self) -> list[Span]:
        """The layers that it holds."""
        return [Span(start, end) for start, end in _spans(sorted(self.held))]

    def hello(self, peer_port: int) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            self.name,
            max_memory_bytes=self.memory,
            free_memory=self.memory,
            speed=round(self.layer_bytes / self.machine.layer_seconds(1)),
            chunk_speed=round(self.layer_bytes / self.machine.layer_seconds(CHUNK_ROWS)),
            peer_hosts=[LOOPBACK],
            peer_port=peer_port,
            paused=self.paused,
        )

    async def _one_connection(self, port: int) -> None:
        try:
            async with self.transport.dial(LOOPBACK, port, timeout=DIAL_SECONDS) as channel, open_link(channel) as link:
                self._connection = NodeConnection(self, link)
                await self._connection.run()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None
        finally:
            self._connection = None


def _spans(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    breaks = [index + 1 for index, (one, other) in enumerate(pairwise(layers)) if other != one + 1]
    for start, end in pairwise([0, *breaks, len(layers)]):
        if start < end:
            yield layers[start], layers[end - 1] + 1
