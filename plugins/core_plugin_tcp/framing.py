"""Frames: four bytes that say how long a message is, most significant first, and the message."""

from __future__ import annotations

import struct

from core.tcp import CLOSED, Goodbye

_HEAD = struct.Struct("!I")
_GOODBYE = 2**32 - 1
"""In the place of a length: nothing follows."""


class LengthPrefixed:
    """One end's Frames. `received` is what has come already, `limit` a message's bytes."""

    def __init__(self, received: bytes, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray(received)

    def frame(self, message: bytes) -> bytes:
        return _HEAD.pack(len(message)) + message

    def feed(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def next_message(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(buffer)
        if size == _GOODBYE:
            raise self._end(CLOSED)
        if size > self.limit:
            raise self._end(f"a message is larger than {self.limit} bytes")
        end = _HEAD.size + size
        if len(buffer) < end:
            return None
        message = bytes(memoryview(buffer)[_HEAD.size : end])
        del buffer[:end]
        return message

    def goodbye(self) -> bytes:
        return _HEAD.pack(_GOODBYE)

    def _end(self, why: str) -> Goodbye:
        self._buffer.clear()
        return Goodbye(why, self.goodbye())
