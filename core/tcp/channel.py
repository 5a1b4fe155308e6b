"""A channel over a connection: whole messages in frames, and an end that both sides know of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio

from core.errors import ChannelClosed
from core.interfaces.transport import GREETING_BYTES, Channel
from core.tcp.connection import CLOSE_TIMEOUT, ENDED, SENT_AT_ONCE, Connection, Writer
from core.tcp.failures import closed

CLOSED = "it was closed"
_RECEIVED_AT_ONCE = 256 * 1024


class Goodbye(Exception):
    """The other end says that it is over, or says nonsense: `why`, in words. `answer` is still to be sent, if any."""

    def __init__(self, why: str, answer: bytes) -> None:
        super().__init__(why)
        self.why = why
        self.answer = answer


class Frames(Protocol):
    """One end's way of writing messages, without I/O. `limit` is how many bytes of a message are taken."""

    limit: int

    def frame(self, message: bytes) -> bytes: ...

    def feed(self, data: bytes | bytearray) -> None: ...

    def next_message(self) -> bytes | None:
        """Of what was fed, or None if it hasn't all come. Raises Goodbye, after which nothing can follow.

        A message that is said to be too large is refused before it has come.
        """

    def goodbye(self) -> bytes:
        """The frame that ends the messages from this side."""


class FramedChannel(Channel):
    """`settle`, which a listener's end has, is called once the peer has proven who it is. Until then a message may have
    `GREETING_BYTES`, and then as many as `frames` take."""

    def __init__(self, connection: Connection, frames: Frames, settle: Callable[[], None] | None = None) -> None:
        self.peer = connection.peer
        self.secure = connection.secure
        self.local_host = connection.tcp.socket.getsockname()[0]
        self._connection = connection
        self._frames = frames
        self._limit = frames.limit
        if settle is not None:
            frames.limit = min(frames.limit, GREETING_BYTES)
        self._settle = settle
        self._writer = Writer(connection)
        self._receiving = False
        self._receiver_left = trio.Event()
        self._why: str | None = None
        """Why the messages ended, once they did, by whichever side; also None if the connection broke off."""

    async def send(self, data: bytes) -> None:
        if self._why is not None:
            raise self._closed()
        await self._write(self._frames.frame(data))

    async def _write(self, frame: bytes) -> None:
        try:
            await self._writer.write(frame)
        except ENDED:
            raise self._closed() from None

    def send_now(self, data: bytes) -> bool:
        return len(data) <= SENT_AT_ONCE and self._writer.write_now(self._frames.frame(data))

    async def receive(self) -> bytes:
        if self._why is not None:
            raise self._closed()
        self._receiving = True
        try:
            while True:
                message = await self._next_message()
                if self._why is None:
                    return message
        finally:
            self._receiving = False
            if self._why is not None:
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
        except ENDED:
            self._connection.cut()
        raise self._closed()

    async def _answer_goodbye(self, goodbye: Goodbye) -> None:
        self._why, self._writer.over = self._why or goodbye.why, True
        try:
            with trio.move_on_after(CLOSE_TIMEOUT), suppress(ChannelClosed):
                await self._write(goodbye.answer)
        finally:
            self._connection.cut()

    def settled(self) -> None:
        self._frames.limit = self._limit
        if self._settle is not None:
            self._settle()

    async def aclose(self) -> None:
        try:
            if self._why is None:
                self._why, self._writer.over = CLOSED, True
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
        return closed(self.peer, self._why)
