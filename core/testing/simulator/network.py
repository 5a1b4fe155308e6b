"""Wires between simulated machines: messages take their time, and machines can be unplugged. See core.testing.transport
for a transport without time."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

import msgspec
import trio

from core.errors import ChannelClosed, CoreError
from core.interfaces.transport import MIN_MESSAGE_BYTES, Channel, Credentials, Handler, Transport
from core.testing.simulator.description import Wire
from core.testing.transport import LOOPBACK

BUFFER_SECONDS = 0.05
"""Of a wire's bytes: so much a sender hands over before it has to wait."""
OVERHEAD_BYTES = 60
"""Of each message, in the headers of the layers below."""
_log = logging.getLogger(__name__)


class Network:
    """`wire` says what joins two machines, `message_seconds` what a machine adds to each message that it takes.

    Hidden states travel without their values, of which each has `value_bytes`: `rows` and `width` say how many.
    """

    def __init__(
        self,
        wire: Callable[[str, str], Wire],
        message_seconds: Callable[[str], float],
        random: Random,
        value_bytes: int,
    ) -> None:
        self.listeners: dict[int, _Listener] = {}
        self.ports = itertools.count(20_000)
        self.unplugged: set[str] = set()
        self._wire = wire
        self._message_seconds = message_seconds
        self._random = random
        self._value_bytes = value_bytes
        self._wires: dict[tuple[str, str], _Wire] = {}

    def one_way(self, sender: str, receiver: str) -> _Wire:
        if (sender, receiver) not in self._wires:
            ends, own = (sender, receiver), self._message_seconds(receiver)
            self._wires[ends] = _Wire(ends, self._wire(*ends), own, self._random, self.unplugged, self._value_bytes)
        return self._wires[sender, receiver]


class MachineTransport(Transport):
    """The network as the machine called `machine` sees it. Nothing is encrypted: all hosts are loopback."""

    name: ClassVar[str] = "simulated"
    max_message: ClassVar[int] = 2 * MIN_MESSAGE_BYTES

    def __init__(self, network: Network, machine: str) -> None:
        self._network = network
        self._machine = machine

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        port = port or next(self._network.ports)
        async with trio.open_nursery() as nursery:
            self._network.listeners[port] = _Listener(self._machine, handler, nursery)
            task_status.started(port)
            try:
                await trio.sleep_forever()
            finally:
                del self._network.listeners[port]

    @asynccontextmanager
    async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> AsyncIterator[Channel]:
        network, title = self._network, f"no connection to {host}:{port}"
        listener = network.listeners.get(port)
        if listener is None:
            raise ChannelClosed(title, "it was refused: nothing listens there")
        out, back = network.one_way(self._machine, listener.machine), network.one_way(listener.machine, self._machine)
        await trio.sleep(min(timeout, out.seconds + back.seconds) if out.is_plugged_in else timeout)
        if not out.is_plugged_in:
            raise ChannelClosed(title, "it timed out: nothing answered")
        if network.listeners.get(port) is not listener:
            raise ChannelClosed(title, "it was refused: nothing listens there")
        near, far = SimulatedChannel(out, f"{host}:{port}"), SimulatedChannel(back, f"{LOOPBACK}:{next(network.ports)}")
        near.other, far.other = far, near
        listener.nursery.start_soon(_serve, listener.handler, far)
        try:
            yield near
        finally:
            near.close()


@dataclass(frozen=True, slots=True)
class _Listener:
    machine: str
    handler: Handler
    nursery: trio.Nursery


class _Payload(msgspec.Struct):
    hidden: tuple[str, int, int, bytes] | None = None


class _Frame(msgspec.Struct):
    payload: _Payload


_FRAMES = msgspec.msgpack.Decoder(_Frame)


@dataclass(slots=True)
class _Wire:
    """From one machine to another; all connections of the two share its bandwidth."""

    ends: tuple[str, str]
    spec: Wire
    own_seconds: float
    random: Random
    unplugged: set[str]
    value_bytes: int
    free_at: float = 0.0

    @property
    def seconds(self) -> float:
        """What the shortest message takes."""
        return self.spec.delay_ms / 1000 + self.own_seconds

    @property
    def is_plugged_in(self) -> bool:
        return self.unplugged.isdisjoint(self.ends)

    @property
    def is_full(self) -> bool:
        return self.free_at > trio.current_time() + BUFFER_SECONDS

    async def drained(self) -> None:
        await trio.sleep_until(self.free_at - BUFFER_SECONDS)

    def arrival(self, data: bytes) -> float:
        """When a message comes that is sent now, by trio's clock."""
        jitter = self.spec.jitter_ms / 1000 * self.random.random() if self.spec.jitter_ms else 0.0
        if not self.spec.mbit:
            return trio.current_time() + self.seconds + jitter
        self.free_at = max(self.free_at, trio.current_time()) + self._nbytes(data) * 8e-6 / self.spec.mbit
        return self.free_at + self.seconds + jitter

    def _nbytes(self, data: bytes) -> int:
        hidden = _FRAMES.decode(data).payload.hidden
        values = hidden[1] * hidden[2] if hidden else 0
        return OVERHEAD_BYTES + len(data) + values * self.value_bytes


@dataclass(slots=True, eq=False)
class SimulatedChannel(Channel):
    """One end of a connection: `wire` leads to the `other` one."""

    wire: _Wire
    peer: str
    other: SimulatedChannel = field(init=False)
    local_host: str = LOOPBACK
    _inbox: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    """With the time when each comes; None is the connection's end."""
    _last: float = 0.0
    _waiting: trio.CancelScope = field(default_factory=trio.CancelScope)
    _ended: str = ""

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        while self.wire.is_full and not self._ended:
            await self.wire.drained()
        if self._ended:
            raise self._closed()
        self._put(data)

    def send_now(self, data: bytes) -> bool:
        if self._ended or self.wire.is_full:
            return False
        self._put(data)
        return True

    async def receive(self) -> bytes:
        while not self._ended:
            due = self._inbox[0][0] if self._inbox else math.inf
            if due > trio.current_time():
                with trio.CancelScope(deadline=due) as self._waiting:
                    await trio.sleep_forever()
                continue
            await trio.lowlevel.checkpoint()
            data = self._inbox.popleft()[1]
            if data is not None:
                return data
            self.close("it was closed by the peer")
        raise self._closed()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self, reason: str = "it was closed") -> None:
        """Ends the connection; the other end still receives what was sent before, then learns of it."""
        if not self._ended:
            self._ended = reason
            self._waiting.cancel()
            self._put(None)

    def _put(self, data: bytes | None) -> None:
        if self.wire.is_plugged_in:
            other = self.other
            seconds = self.wire.arrival(data) if data is not None else trio.current_time() + self.wire.seconds
            other._last = max(other._last, seconds)
            other._inbox.append((other._last, data))
            if len(other._inbox) == 1:
                other._waiting.deadline = other._last

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the connection to {self.peer} ended", self._ended)


async def _serve(handler: Handler, channel: SimulatedChannel) -> None:
    try:
        await handler(channel)
    except* CoreError as group:
        _log.info("connection from %s: %s", channel.peer, group.exceptions)
    finally:
        channel.close()
