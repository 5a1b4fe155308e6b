"""A transport within one process, for tests of what runs over transports: no sockets, and faults on demand."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import trio

from core.errors import ChannelClosed, ConfigError, CoreError, TrustError
from core.interfaces.transport import Channel, Credentials, Handler, Transport
from core.trust.addresses import host_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ANY_HOST = ("0.0.0.0", "::")
FIRST_PORT = 20_000
BUFFERED_MESSAGES = 4


class MemoryTransport(Transport):
    """Connects those who share the instance; nothing is encrypted, but pins are held against certificates.
    A listener on 0.0.0.0 is reached by every host name, others by theirs.

    `sever` and `stall` break a port's connections in the two ways in which real ones break.
    """

    name: ClassVar[str] = "memory"
    max_message: ClassVar[int] = 1024 * 1024

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}
        self._numbers = itertools.count(FIRST_PORT)

    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        if port in self._listeners:
            raise ConfigError(f"can't listen on {host}:{port}", "the port is in use", "choose another port")
        port = port or self._free_port()
        async with trio.open_nursery() as nursery:
            self._listeners[port] = _Listener(host, handler, nursery, credentials.fingerprint if credentials else None)
            task_status.started(port)
            try:
                await trio.sleep_forever()
            finally:
                del self._listeners[port]

    @asynccontextmanager
    async def dial(
        self, host: str, port: int, *, timeout: float, pin: bytes | None = None, origin: str = LOOPBACK
    ) -> AsyncIterator[Channel]:
        """`origin` is the dialler's own address."""
        await trio.lowlevel.checkpoint()
        title = f"no connection to {host}:{port}"
        listener = self._listeners.get(port)
        if listener is None or listener.host not in (host, *ANY_HOST):
            raise ChannelClosed(title, "it was refused: nothing listens there", "check the host and the port")
        if listener.stalled:
            await trio.sleep(timeout)
            raise ChannelClosed(title, "it timed out: nothing answered", "see whether the machine is on")
        if pin is not None and pin != listener.fingerprint:
            raise TrustError(f"{host}:{port} is not who it should be", "it has another certificate, or none")
        near, far = _connected(listener, f"{host}:{port}", f"{origin}:{next(self._numbers)}", host)
        near.secure = far.secure = pin is not None
        listener.nursery.start_soon(_serve, listener, far)
        try:
            yield near
        finally:
            near.close()

    def sever(self, port: int) -> None:
        """Ends all connections to the port at once, as when the process behind it is killed."""
        for channel in list(self._listeners[port].channels):
            channel.close("it broke off without a goodbye")

    def stall(self, port: int) -> None:
        """Lets all messages to and from the port vanish from now on, as when a cable is cut: nobody is told."""
        self._listeners[port].stalled = True

    def _free_port(self) -> int:
        return next(number for number in self._numbers if number not in self._listeners)


@dataclass(eq=False)
class _Cable:
    stalled: bool = False


@dataclass(eq=False)
class _Listener:
    host: str
    handler: Handler
    nursery: trio.Nursery
    fingerprint: bytes | None
    stalled: bool = False
    channels: set[MemoryChannel] = field(default_factory=set)


class MemoryChannel(Channel):
    """One end of a connection."""

    def __init__(
        self,
        listener: _Listener,
        cable: _Cable,
        peer: str,
        local_host: str,
        outgoing: trio.MemorySendChannel[bytes],
        incoming: trio.MemoryReceiveChannel[bytes],
    ) -> None:
        self.peer = peer
        self.local_host = local_host
        self._listener = listener
        self._cable = cable
        self._outgoing = outgoing
        self._incoming = incoming
        self._ended = ""
        listener.channels.add(self)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if len(data) > MemoryTransport.max_message:
            self.close(f"a message of {len(data)} bytes is larger than {MemoryTransport.max_message}")
        if self._ended:
            raise self._closed()
        if self._is_stalled():
            return
        try:
            await self._outgoing.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed() from None

    async def receive(self) -> bytes:
        try:
            return await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise self._closed() from None

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self, reason: str = "it was closed") -> None:
        """Ends the connection; the other end still receives what was sent before, then learns of it."""
        self._ended = self._ended or reason
        self._listener.channels.discard(self)
        self._incoming.close()
        if not self._is_stalled():
            self._outgoing.close()

    def stall(self) -> None:
        """Lets all messages of this one connection vanish from now on, both ways: nobody is told."""
        self._cable.stalled = True

    def _is_stalled(self) -> bool:
        return self._cable.stalled or self._listener.stalled

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the connection to {self.peer} ended", self._ended or "it was closed by the peer")


def _connected(listener: _Listener, server: str, client: str, server_host: str) -> tuple[MemoryChannel, MemoryChannel]:
    """The client's and the server's end of a new connection."""
    to_server, from_client = trio.open_memory_channel[bytes](BUFFERED_MESSAGES)
    to_client, from_server = trio.open_memory_channel[bytes](BUFFERED_MESSAGES)
    cable = _Cable()
    return (
        MemoryChannel(listener, cable, server, host_of(client), to_server, from_server),
        MemoryChannel(listener, cable, client, server_host, to_client, from_client),
    )


async def _serve(listener: _Listener, channel: MemoryChannel) -> None:
    try:
        await listener.handler(channel)
    except* CoreError as group:
        logger.info("connection from %s: %s", channel.peer, group.exceptions)
    except* Exception:
        logger.exception("connection from %s: its handler failed", channel.peer)
    finally:
        channel.close()
