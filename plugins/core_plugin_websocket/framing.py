"""Websocket frames (RFC 6455, section 5). A binary message in one frame is read and made here, for nearly all are that;
whatever else comes is wsproto's to read and to answer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import numpy as np
from trio_websocket import CloseReason
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

import core.tcp
from core_plugin_websocket.failures import in_words

_FINAL_BINARY = 0x82
_MASKED = 0x80
_KEY_BYTES = 4
_SMALL = 8 * 1024
"""Bytes up to which Python's own numbers are XORed sooner than numpy's arrays, whose code is seldom in the cache."""
_NORMAL = 1000
_UNSUPPORTED = 1003
_TOO_BIG = 1009


class Goodbye(core.tcp.Goodbye):
    def __init__(self, reason: CloseReason, answer: bytes) -> None:
        super().__init__(in_words(reason), answer)
        self.reason = reason


class Frames:
    """One end of an open websocket, without I/O. `received` is what has come already, `limit` a message's bytes.

    `on_ping` is called with the pong that a ping asks for.
    """

    def __init__(self, received: bytes, *, client: bool, limit: int, on_ping: Callable[[bytes], None]) -> None:
        self._client = client
        self.limit = limit
        self._on_ping = on_ping
        self._buffer = bytearray(received)
        self._protocol = Connection(ConnectionType.CLIENT if client else ConnectionType.SERVER)
        self._fragments: bytearray | None = None

    def frame(self, message: bytes) -> bytes:
        return binary_frame(message, client=self._client)

    def feed(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def next_message(self) -> bytes | None:
        """The next message, or None where it hasn't all come. Raises Goodbye, after which nothing can follow."""
        while (extent := _payload_extent(self._buffer)) is not None:
            start, end = extent
            if len(self._fragments or b"") + end - start > self.limit:
                raise self._refusal(_TOO_BIG, f"a message is larger than {self.limit} bytes")
            if len(self._buffer) < end:
                return None
            message = self._whole_message(start, end) if self._is_whole_message() else self._read_other(end)
            del self._buffer[:end]
            if message is not None:
                return message
        return None

    def goodbye(self) -> bytes:
        """The frame that ends the websocket from this side."""
        return self._close(CloseConnection(_NORMAL))

    def _is_whole_message(self) -> bool:
        """A fragmented message's frames, and whatever breaks into it, are for wsproto."""
        expected_mask = 0 if self._client else _MASKED
        return (
            self._buffer[0] == _FINAL_BINARY and self._buffer[1] & _MASKED == expected_mask and self._fragments is None
        )

    def _whole_message(self, start: int, end: int) -> bytes:
        payload = bytes(memoryview(self._buffer)[start:end])
        return payload if self._client else masked(payload, bytes(self._buffer[start - _KEY_BYTES : start]))

    def _read_other(self, end: int) -> bytes | None:
        self._protocol.receive_data(bytes(memoryview(self._buffer)[:end]))
        for event in self._protocol.events():
            if isinstance(event, BytesMessage):
                self._fragments = (self._fragments or bytearray()) + event.data
                if event.message_finished:
                    message, self._fragments = bytes(self._fragments), None
                    return message
            elif isinstance(event, TextMessage):
                raise self._refusal(_UNSUPPORTED, "a text message came where only binary ones are spoken")
            elif isinstance(event, Ping) and self._protocol.state is ConnectionState.OPEN:
                self._on_ping(self._protocol.send(event.response()))
            elif isinstance(event, CloseConnection):
                raise self._end(event)
        return None

    def _refusal(self, code: int, reason: str) -> Goodbye:
        return self._end(CloseConnection(code, reason))

    def _end(self, event: CloseConnection) -> Goodbye:
        self._buffer.clear()
        return Goodbye(CloseReason(event.code, event.reason), self._close(event))

    def _close(self, event: CloseConnection) -> bytes:
        """Answers the peer's close, or begins one; nothing where that was done before."""
        if self._protocol.state is ConnectionState.REMOTE_CLOSING:
            event = event.response()
        elif self._protocol.state is not ConnectionState.OPEN:
            return b""
        frame: bytes = self._protocol.send(event)
        return frame


def _payload_extent(buffer: bytearray) -> tuple[int, int] | None:
    """Where the first frame's payload begins and ends. None while its head hasn't all come."""
    if len(buffer) < 2:
        return None
    start, size = 2, buffer[1] & ~_MASKED
    if size >= 126:
        start = 4 if size == 126 else 10
        size = int.from_bytes(buffer[2:start])
    if buffer[1] & _MASKED:
        start += _KEY_BYTES
    return (start, start + size) if len(buffer) >= start else None


def binary_frame(data: bytes, *, client: bool) -> bytes:
    """A whole message in one frame, masked as a client's has to be."""
    mask_bit = _MASKED if client else 0
    if len(data) < 126:
        head = struct.pack("!BB", _FINAL_BINARY, mask_bit | len(data))
    elif len(data) < 1 << 16:
        head = struct.pack("!BBH", _FINAL_BINARY, mask_bit | 126, len(data))
    else:
        head = struct.pack("!BBQ", _FINAL_BINARY, mask_bit | 127, len(data))
    if not client:
        return head + data
    key = os.urandom(_KEY_BYTES)
    return head + key + masked(data, key)


def masked(data: bytes, key: bytes) -> bytes:
    """`data` XORed with the repeated key: masks and unmasks (section 5.3)."""
    size = len(data)
    if size <= _SMALL:
        keys = (key * (size // _KEY_BYTES + 1))[:size]
        return (int.from_bytes(data) ^ int.from_bytes(keys)).to_bytes(size)
    padded = np.frombuffer(data + bytes(-size % _KEY_BYTES), np.uint32)
    return (padded ^ np.frombuffer(key, np.uint32)).tobytes()[:size]
