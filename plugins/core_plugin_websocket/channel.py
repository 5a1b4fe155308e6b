"""A channel over an open websocket: messages in frames, pings answered, an end that both sides know of."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio
from trio_websocket import CloseReason

from core import Channel, ChannelClosed
from core_plugin_websocket.failures import closed
from core_plugin_websocket.framing import Frames, Goodbye, binary_frame

MAX_MESSAGE = 1024 * 1024
CLOSE_TIMEOUT = 1.0
"""Seconds that a peer has to answer a close before the socket is closed over its head."""
_SENT_AT_ONCE = 64 * 1024
"""Bytes of a message that may go past the event loop: what a socket's buffer takes without waiting."""
_RECEIVED_AT_ONCE = 256 * 1024
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection: the stream that carries the websocket, and the sockets under it."""

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


class WebSocketChannel(Channel):
    """`received` is what came behind the handshake; `nursery` is for answers to pings.

    Sends no pings: with large messages both ways they deadlock with peers that answer where they read.
    """

    def __init__(
        self,
        connection: Connection,
        received: bytes,
        nursery: trio.Nursery,
        *,
        client: bool,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer = connection.peer
        self.secure = connection.secure
        self.local_host = connection.tcp.socket.getsockname()[0]
        self._connection = connection
        self._stream = connection.stream
        self._nursery = nursery
        self._client = client
        self._settle = settle
        self._frames = Frames(received, client=client, limit=MAX_MESSAGE, on_ping=self._answer_ping)
        self._pong = b""
        self._turns = trio.Lock()
        self._writing = threading.Lock()
        """Held while a frame is written, by the task whose turn it is or by a thread."""
        self._receiving = False
        self._receiver_left = trio.Event()
        self._reason: CloseReason | None = None
        """Why the websocket was closed, once it was, by whichever side; also None where the connection broke off."""

    async def send(self, data: bytes) -> None:
        if self._reason is not None:
            raise self._closed()
        await self._write(binary_frame(data, client=self._client))

    async def _write(self, frame: bytes) -> None:
        try:
            async with self._turns:
                while not self._writing.acquire(blocking=False):
                    await trio.lowlevel.checkpoint()
                try:
                    await self._stream.send_all(frame)
                except trio.Cancelled:
                    self._connection.cut()  # half a frame may be out, and the peer would read the next as its rest
                    raise
                finally:
                    self._writing.release()
        except _ENDED:
            raise self._closed() from None

    def send_now(self, data: bytes) -> bool:
        raw = self._connection.raw
        if raw is None or len(data) > _SENT_AT_ONCE or not self._writing.acquire(blocking=False):
            return False
        try:
            return self._reason is None and _sent(raw, binary_frame(data, client=self._client))
        finally:
            self._writing.release()

    async def receive(self) -> bytes:
        if self._reason is not None:
            raise self._closed()
        self._receiving = True
        try:
            while True:
                message = await self._next_message()
                if self._reason is None:
                    return message
        finally:
            self._receiving = False
            if self._reason is not None:
                self._receiver_left.set()

    async def _next_message(self) -> bytes:
        try:
            while (message := self._frames.next_message()) is None:
                data = await self._connection.receive_some(_RECEIVED_AT_ONCE)
                if not data:
                    raise trio.BrokenResourceError
                self._frames.feed(data)
            return message
        except Goodbye as goodbye:
            await self._answer_goodbye(goodbye)
        except _ENDED:
            self._connection.cut()
        raise self._closed()

    async def _answer_goodbye(self, goodbye: Goodbye) -> None:
        self._reason = self._reason or goodbye.reason
        try:
            with trio.move_on_after(CLOSE_TIMEOUT), suppress(ChannelClosed):
                await self._write(goodbye.answer)
        finally:
            self._connection.cut()

    def _answer_ping(self, pong: bytes) -> None:
        """From a task of its own: peers that send where they should receive may wait for each other for ever."""
        if not self._pong:
            self._nursery.start_soon(self._send_pong)
        self._pong = pong

    async def _send_pong(self) -> None:
        pong, self._pong = self._pong, b""
        with suppress(ChannelClosed):
            await self._write(pong)

    def settled(self) -> None:
        self._settle()

    async def aclose(self) -> None:
        try:
            if self._reason is None:
                self._reason = CloseReason(1000, None)
                with trio.move_on_after(CLOSE_TIMEOUT), suppress(ChannelClosed):
                    await self._write(self._frames.goodbye())
                    await self._receive_the_rest()
        finally:
            self._connection.cut()

    async def _receive_the_rest(self) -> None:
        """Until the peer has closed: what it is still sending would make its system drop what we have sent."""
        if self._receiving:
            await self._receiver_left.wait()
        while True:
            await self._next_message()

    def _closed(self) -> ChannelClosed:
        return closed(self.peer, self._reason)


def _sent(raw: socket.socket, frame: bytes) -> bool:
    """The socket is the event loop's as well: it stays one that waits for nothing, and the loop alone closes it."""
    try:
        sent = raw.send(frame)
    except OSError:
        return False  # no room in the socket's buffer now, or no connection any more: `send` will tell
    if sent < len(frame):
        _finish(raw, memoryview(frame)[sent:])
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
