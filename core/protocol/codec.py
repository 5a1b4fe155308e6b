"""Messages <-> frames: msgpack envelopes, with large tensors continued in CHUNK frames.

A frame is the msgpack map {"type", "request_id", "seq", "payload"}. A message whose tensor is larger than `CHUNK_BYTES`
carries the first bytes itself, and the rest follows in CHUNK frames on the same link, in order, with nothing between.
msgpack writes; msgspec reads, and checks every field as it does.
"""

from __future__ import annotations

from typing import cast

import msgpack
import msgspec

from core.errors import ProtocolError
from core.protocol.fields import Tensor
from core.protocol.messages import PROTOCOL_VERSION, Chunk, Hello, HiddenState, Message, PeerHello, Run

CHUNK_BYTES = 128 * 1024
MAX_FRAME_BYTES = 512 * 1024
"""Of any frame: chunk, or control message with a model's config in it."""
MAX_TENSOR_BYTES = 256 * 1024 * 1024
_ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}


class Packet(msgspec.Struct, frozen=True):
    """A message with its envelope: `request_id` ties an answer to its question, `seq` counts a link's messages."""

    message: Message
    request_id: str = ""
    seq: int = 0


def encode(packet: Packet) -> list[bytes]:
    """The frames of a packet, of at most `MAX_FRAME_BYTES` each. Raises ProtocolError for a message too large."""
    if fits_one_frame(packet.message):
        return [encode_whole(packet)]
    tensor = packet.message.hidden  # type: ignore[attr-defined]
    data = memoryview(tensor.data)
    head = msgspec.structs.replace(tensor, data=data[:CHUNK_BYTES])
    rest = (data[start : start + CHUNK_BYTES] for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES))
    return [
        _frame(msgspec.structs.replace(packet.message, hidden=head), packet),
        *(_frame(Chunk(cast(bytes, piece)), packet) for piece in rest),
    ]


def encode_whole(packet: Packet) -> bytes:
    """The frame of a packet that fits one."""
    return _frame(packet.message, packet)


def fits_one_frame(message: Message) -> bool:
    """Whether no CHUNK has to follow."""
    return not isinstance(message, (Run, HiddenState)) or len(message.hidden.data) <= CHUNK_BYTES


def _frame(message: Message, packet: Packet) -> bytes:
    payload = msgspec.to_builtins(message, builtin_types=(bytes, memoryview, bytearray))
    envelope = {"type": message.TYPE, "request_id": packet.request_id, "seq": packet.seq, "payload": payload}
    frame: bytes = msgpack.packb(envelope)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {message.TYPE} of {len(frame)} bytes is too large to send")
    return frame


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    request_id: str
    seq: int
    payload: msgspec.Raw


class _Greeting(msgspec.Struct):
    """What a greeting says in any version of the protocol."""

    protocol: int


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_GREETING = msgspec.msgpack.Decoder(_Greeting)


def _leaves(base: type[Message]) -> list[type[Message]]:
    return [leaf for sub in base.__subclasses__() for leaf in (_leaves(sub) or [sub])]


BY_TYPE: dict[str, type[Message]] = {message.TYPE: message for message in _leaves(Message)}
_PAYLOADS = {name: msgspec.msgpack.Decoder(kind) for name, kind in BY_TYPE.items()}
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""ValueError is what an older msgspec says of invalid UTF-8, RecursionError of deep nesting."""


class Decoder:
    """Frames of one link, in order -> packets. Holds of an unfinished tensor what came, not what is announced."""

    def __init__(self) -> None:
        self.limit = MAX_TENSOR_BYTES
        """The largest tensor that is taken, in bytes; and no larger frame, which `MAX_FRAME_BYTES` limits as well."""
        self._pending: Packet | None = None
        self._buffer = bytearray()
        self._size = 0

    def feed(self, frame: bytes) -> Packet | None:
        """The packet that `frame` completes, if it does. Raises ProtocolError for anything that isn't protocol."""
        packet = _parse(frame, min(self.limit, MAX_FRAME_BYTES))
        if isinstance(packet.message, Chunk):
            return self._continue(packet.message.data)
        if self._pending is not None:
            raise ProtocolError(f"a {packet.message.TYPE} came before the end of a tensor")
        if isinstance(packet.message, (Run, HiddenState)):
            return self._begin(packet, packet.message.hidden)
        return packet

    def _begin(self, packet: Packet, tensor: Tensor) -> Packet | None:
        size = tensor.rows * tensor.width * _ITEMSIZE.get(tensor.dtype, 0)
        if size > self.limit:
            raise ProtocolError(f"a tensor of {size} bytes is announced", f"the limit is {self.limit}")
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


def _parse(frame: bytes, limit: int) -> Packet:
    if len(frame) > limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes came", f"the limit is {limit}")
    try:
        envelope = _ENVELOPE.decode(frame)
    except _UNREADABLE as error:
        raise ProtocolError("a frame came that is no message", str(error) or type(error).__name__) from None
    payload = _PAYLOADS.get(envelope.type)
    if payload is None:
        raise ProtocolError(f"a message of unknown type {envelope.type[:64]!r} came")
    try:
        message = payload.decode(envelope.payload)
    except _UNREADABLE as error:
        foreign = _foreign_greeting(envelope)
        if foreign is None:
            raise ProtocolError(f"a {envelope.type} came that does not read", str(error)) from None
        message = foreign
    return Packet(message, envelope.request_id, envelope.seq)


def _foreign_greeting(envelope: _Envelope) -> Message | None:
    """Of a greeting in another version of the protocol, whatever it looks like: the version, to be named in an answer.

    None where it isn't one.
    """
    try:
        protocol = _GREETING.decode(envelope.payload).protocol
    except _UNREADABLE:
        return None
    if protocol == PROTOCOL_VERSION:
        return None
    if envelope.type == Hello.TYPE:
        return Hello(protocol, node_id="")
    return PeerHello(protocol, hop=0, link_token=b"") if envelope.type == PeerHello.TYPE else None
