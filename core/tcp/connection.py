"""A TCP connection: its stream, its sockets, and who may write to it."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import trio

CLOSE_TIMEOUT = 1.0
"""Seconds that a peer has to answer a goodbye, or to take what was begun, before the connection is ended."""
ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)
"""What a connection raises that is no more."""
SENT_AT_ONCE = 64 * 1024
"""Bytes of a message that may go past the event loop: what a socket's buffer takes without waiting."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection: the stream that carries the messages, and the sockets under it."""

    peer: str
    stream: trio.abc.Stream
    tcp: trio.SocketStream
    raw: socket.socket | None
    """The plain socket, which any thread can send on. None where `stream` does more than move its bytes."""

    @classmethod
    def over(cls, stream: trio.SocketStream, peer: str) -> Connection:
        """Takes `stream`'s socket over: trio keeps its plain socket to itself."""
        raw = socket.socket(fileno=stream.socket.detach())
        raw.setblocking(False)
        tcp = trio.SocketStream(trio.socket.from_stdlib_socket(raw))
        return cls(peer, tcp, tcp, raw)

    @property
    def secure(self) -> bool:
        return self.stream is not self.tcp

    async def receive_some(self, size: int) -> bytes | bytearray:
        """As the stream does, in half the time where there is the plain socket."""
        if self.raw is None:
            return await self.stream.receive_some(size)
        while self.raw.fileno() >= 0:
            await trio.lowlevel.wait_readable(self.raw)
            try:
                return self.raw.recv(size)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError from error
        raise trio.ClosedResourceError

    def cut(self) -> None:
        """Ends it at once, and wakes whoever waits for it."""
        self.tcp.socket.close()


class Writer:
    """Writes whole frames to a connection, in turns: its tasks, and with `write_now` any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.over = False
        """Set once there is nothing more to say: `write_now` writes nothing then."""
        self._turns = trio.Lock()
        self._writing = threading.Lock()
        """Held while a frame is written, by the task whose turn it is or by a thread."""

    async def write(self, frame: bytes) -> None:
        """Raises one of `ENDED`. If it is cancelled midway, the connection ends."""
        async with self._turns:
            while not self._writing.acquire(blocking=False):
                await trio.lowlevel.checkpoint()
            try:
                await self._connection.stream.send_all(frame)
            except trio.Cancelled:
                self._connection.cut()  # half a frame may be out, and the peer would read the next as its rest
                raise
            finally:
                self._writing.release()

    def write_now(self, frame: bytes) -> bool:
        """Past the event loop, from any thread. False: nothing was written."""
        raw = self._connection.raw
        if raw is None or not self._writing.acquire(blocking=False):
            return False
        try:
            return not self.over and sent(raw, frame)
        finally:
            self._writing.release()


def sent(raw: socket.socket, frame: bytes) -> bool:
    """The socket is the event loop's as well: it stays one that waits for nothing, and the loop alone closes it."""
    try:
        taken = raw.send(frame)
    except OSError:
        return False  # no room in the socket's buffer now, or no connection any more: `send` will tell
    if taken < len(frame):
        _finish(raw, memoryview(frame)[taken:])
    return True


def _finish(raw: socket.socket, rest: memoryview) -> None:
    """The peer would read the next frame as the rest of this one: it is sent now, or the connection ends."""
    deadline = time.monotonic() + CLOSE_TIMEOUT
    with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
        selector.register(raw, selectors.EVENT_WRITE)
        while rest and selector.select(max(0, deadline - time.monotonic())):
            rest = rest[raw.send(rest) :]
    if rest:
        with suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
