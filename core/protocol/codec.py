"""Messages <-> frames: msgpack envelopes, with large tensors continued in CHUNK frames.

A frame is the msgpack map {"type", "request_id", "seq", "payload"}. A message whose tensor is larger than `CHUNK_BYTES`
carries the first bytes itself, and the rest follows in CHUNK frames on the same link, in order, with nothing between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import msgspec

from core.errors import ProtocolError
from core.protocol.messages import (
    BY_TYPE,
    PROTOCOL_VERSION,
    Chunk,
    Hello,
    HiddenState,
    Message,
    PeerHello,
    Run,
    Tensor,
)

CHUNK_BYTES = 128 * 1024
MAX_FRAME_BYTES = 512 * 1024
"""Of any frame: chunk, or control message with a model's config in it."""
MAX_TENSOR_BYTES = 256 * 1024 * 1024
_ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Packet:
    """A message with its envelope: `request_id` ties an answer to its question, `seq` counts a link's messages."""

    message: Message
    request_id: str = ""
    seq: int = 0


def encode(packet: Packet) -> Iterator[bytes]:
    """The frames of a packet, of at most `MAX_FRAME_BYTES` each. Raises ProtocolError for a message too large."""
    if fits_one_frame(packet.message):
        yield _frame(packet.message, packet)
        return
    tensor = packet.message.hidden  # type: ignore[attr-defined]
    data = memoryview(tensor.data)
    head = msgspec.structs.replace(tensor, data=data[:CHUNK_BYTES])
    yield _frame(msgspec.structs.replace(packet.message, hidden=head), packet)
    for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
        yield _frame(Chunk(bytes(data[start : start + CHUNK_BYTES])), packet)


def fits_one_frame(message: Message) -> bool:
    """Whether no CHUNK has to follow."""
    return not isinstance(message, (Run, HiddenState)) or len(message.hidden.data) <= CHUNK_BYTES


def _frame(message: Message, packet: Packet) -> bytes:
    payload = msgspec.to_builtins(message, builtin_types=(bytes, memoryview, bytearray))
    frame: bytes = msgpack.packb(
        {"type": message.TYPE, "request_id": packet.request_id, "seq": packet.seq, "payload": payload}
    )
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {message.TYPE} of {len(frame)} bytes is too large to send")
    return frame


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    request_id: str
    seq: int
    payload: dict[str, Any]


class Decoder:
    """Frames of one link, in order -> packets. Holds of an unfinished tensor what came, not what is announced."""

    def __init__(self) -> None:
        self._pending: Packet | None = None
        self._buffer = bytearray()
        self._size = 0

    def feed(self, frame: bytes) -> Packet | None:
        """The packet that `frame` completes, if it does. Raises ProtocolError for anything that isn't protocol."""
        packet = _parse(frame)
        if isinstance(packet.message, Chunk):
            return self._continue(packet.message.data)
        if self._pending is not None:
            raise ProtocolError(f"a {packet.message.TYPE} came before the end of a tensor")
        if isinstance(packet.message, (Run, HiddenState)):
            return self._begin(packet, packet.message.hidden)
        return packet

    def _begin(self, packet: Packet, tensor: Tensor) -> Packet | None:
        size = tensor.rows * tensor.width * _ITEMSIZE.get(tensor.dtype, 0)
        if size > MAX_TENSOR_BYTES:
            raise ProtocolError(f"a tensor of {size} bytes is announced", f"the limit is {MAX_TENSOR_BYTES}")
        if len(tensor.data) > size:
            raise ProtocolError("a tensor carries more bytes than its shape has room for")
        if len(tensor.data) == size:
            return packet
        self._pending, self._buffer, self._size = packet, bytearray(), size
        return self._continue(tensor.data)

    def _continue(self, data: bytes) -> Packet | None:
        if self._pending is None:
            raise ProtocolError("a CHUNK came that continues no tensor")
        if not data or len(self._buffer) + len(data) > self._size:
            raise ProtocolError("a CHUNK does not fit the tensor that it continues")
        self._buffer += data
        if len(self._buffer) < self._size:
            return None
        packet, message = self._pending, self._pending.message
        assert isinstance(message, (Run, HiddenState))
        tensor = msgspec.structs.replace(message.hidden, data=cast(bytes, self._buffer))
        self._pending, self._buffer = None, bytearray()
        return Packet(msgspec.structs.replace(message, hidden=tensor), packet.request_id, packet.seq)


def _parse(frame: bytes) -> Packet:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes came", f"the limit is {MAX_FRAME_BYTES}")
    try:
        raw = msgpack.unpackb(frame)
        envelope = msgspec.convert(raw, _Envelope)
    # msgpack raises its own kinds beside ValueError, and RecursionError for deep nesting.
    except (ValueError, msgpack.UnpackException, RecursionError, msgspec.ValidationError) as error:
        raise ProtocolError("a frame came that is no message", str(error) or type(error).__name__) from None
    kind = BY_TYPE.get(envelope.type)
    if kind is None:
        raise ProtocolError(f"a message of unknown type {envelope.type[:64]!r} came")
    try:
        message = msgspec.convert(envelope.payload, kind)
    # An older msgspec meets invalid UTF-8 with a ValueError.
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        foreign = _foreign_greeting(kind, envelope.payload)
        if foreign is None:
            raise ProtocolError(f"a {envelope.type} came that does not read", str(error)) from None
        message = foreign
    return Packet(message, envelope.request_id, envelope.seq)


def _foreign_greeting(kind: type[Message], payload: dict[str, Any]) -> Message | None:
    """Of a greeting in another version of the protocol, whatever it looks like: the version, to be named in an answer.

    None where it isn't one.
    """
    protocol = payload.get("protocol")
    if type(protocol) is not int or protocol == PROTOCOL_VERSION:
        return None
    if kind is Hello:
        return Hello(protocol, node_id="")
    return PeerHello(protocol, epoch=0, link_token=b"") if kind is PeerHello else None
