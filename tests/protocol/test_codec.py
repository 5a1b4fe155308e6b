"""Every message survives the wire, in frames of the size that was promised; what isn't protocol is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import msgspec
import pytest

from core.errors import ProtocolError
from core.protocol.codec import (
    BY_TYPE,
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    MAX_TENSOR_BYTES,
    Decoder,
    Packet,
    encode,
)
from core.protocol.fields import Holding, LayerTime, OnDisk, PeerLink, Plugin, Proof, Segment, Shard, Span, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Asking,
    Assignment,
    Challenge,
    Chunk,
    ClearCache,
    ConnectPeer,
    CopyCache,
    Error,
    Hello,
    HelloAck,
    HiddenState,
    InferenceError,
    KeepLayers,
    Leave,
    LeftOut,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    Message,
    NodeState,
    Pause,
    PeerConnected,
    PeerHello,
    PeerLost,
    Ping,
    Pong,
    Release,
    Reveal,
    RunDecode,
    RunPrefill,
    StandBy,
)

TOKEN = bytes(range(16))
PROOF = Proof(bytes(32), {"config.json": bytes(range(32)), "unknown": b""}, {}, [bytes(32)] * 4 + [b""])
FINGERPRINT = bytes(range(32))
SHARD = Shard(
    model_id="org/model",
    revision=None,
    architecture="llama",
    quant="fp16",
    compute_dtype="fp16",
    layer_start=4,
    layer_end=9,
    weight_bytes=2**40,
    proof=PROOF,
    parity_layer=4,
)
LAYER_TIME = LayerTime(bytes(range(16)), 1_200_000, 0)
ON_DISK = OnDisk(bytes(32), [Span(0, 4)])
HOLDING = Holding(bytes(32), "fp16", "fp16", [Span(0, 4), Span(7, 9)])
EXAMPLES: list[Message] = [
    Hello(
        protocol=PROTOCOL_VERSION,
        node_id="zoë's laptop",
        hostname="laptop",
        core_version="0.1.0",
        selected_device="mps",
        max_memory_bytes=8_000_000_000,
        free_memory=6_000_000_000,
        speed=60_000_000_000,
        chunk_speed=900_000_000,
        layer_times=[LAYER_TIME],
        on_disk=[ON_DISK],
        load_speed=2**30,
        labels=["attic", "rtx-4090"],
        plugins=[Plugin("core-cluster", "0.1.0", ["architecture llama"])],
        holdings=[HOLDING],
        peer_hosts=["192.168.1.7", "fe80::1"],
        peer_port=50_123,
        local_token=TOKEN,
        certificate=bytes(300),
        signature=bytes(70),
        invite=TOKEN,
    ),
    Challenge(FINGERPRINT),
    Asking(FINGERPRINT),
    Reveal(FINGERPRINT),
    HelloAck(PROTOCOL_VERSION, "0.1.0", "zoë-abcdefgh"),
    Error("protocol_version", "install the same version on both"),
    Assignment(hop=3, next_hop=None, shard=SHARD, wire_dtype="fp32", link_token=TOKEN, downstream=FINGERPRINT),
    Assignment(hop=3, next_hop=4, shard=SHARD, wire_dtype="fp32", link_token=TOKEN),
    StandBy(hop=5, shard=SHARD, in_memory=True),
    KeepLayers([HOLDING]),
    LeftOut("this machine lacks the quantizer int3"),
    LoadProgress(3, "download", 10, 20),
    LoadComplete(3, 2**33, 0, 1.5, {"RMS norm": bytes(128)}),
    LoadFailed(3, "the disk is full"),
    ConnectPeer(3, 2, ["192.168.1.7"], 50_123, TOKEN, FINGERPRINT),
    PeerConnected(3, False, "it timed out"),
    PeerHello(PROTOCOL_VERSION, 2, TOKEN, bytes(300), bytes(70)),
    PeerLost(3, "the link to the upstream node"),
    Release(3),
    Pause("this machine runs on battery"),
    Pause("its user quit", leaves=True),
    Leave("its user quit"),
    NodeState(sessions=2, kv_tokens=700, kv_bytes=2**31, free_memory=2**34, kv_room=2**33, holdings=[HOLDING]),
    NodeState(0, 0, 0, 2**34, layer_times=[LAYER_TIME], links=[PeerLink(3, 20_000, 2**24)], on_disk=[ON_DISK]),
    Ping(2**50),
    Pong(2**50),
    Ping(2**50, bytes(2**16)),
    Pong(2**50, bytes(2**16)),
    RunPrefill(3, [Segment(1, 0, 2, 1)], Tensor("fp16", 2, 3, bytes(range(12))), []),
    RunDecode(3, [Segment(1, 2, 1, 1), Segment(9, 5, 1, 1)], Tensor("fp32", 2, 1, bytes(range(8))), [17, 2**40]),
    HiddenState(3, Tensor("bf16", 1, 4, bytes(range(8))), [17, 18]),
    InferenceError(3, "layers [4, 9) computed hidden states that are not finite"),
    ClearCache(3, [1, 2**60]),
    CopyCache(3, 1, 2**60, 4096),
]


def frames_of(message: Message, request_id: str = "2a", seq: int = 7) -> list[bytes]:
    return list(encode(Packet(message, request_id, seq)))


def decoded(frames: list[bytes]) -> Packet:
    decoder = Decoder()
    packets = [decoder.feed(frame) for frame in frames]
    assert packets[:-1] == [None] * (len(frames) - 1)
    assert packets[-1] is not None
    return packets[-1]


def frame(kind: str, payload: Any, **changes: Any) -> bytes:
    return bytes(msgpack.packb({"type": kind, "request_id": "1", "seq": 1, "payload": payload, **changes}))


def run_payload(**tensor: Any) -> dict[str, Any]:
    values = {"dtype": "fp32", "rows": 1, "width": 2, "data": bytes(8), **tensor}
    return {"hop": 1, "segments": [[1, 0, 1, 1]], "hidden": list(values.values()), "compute_us": []}


def test_there_is_an_example_of_every_type() -> None:
    assert {type(message) for message in EXAMPLES} | {Chunk} == set(BY_TYPE.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TYPE)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    frames = frames_of(message)
    assert len(frames) == 1
    assert decoded(frames) == Packet(message, "2a", 7)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TYPE)
def test_the_envelope_has_four_keys(message: Message) -> None:
    envelope = msgpack.unpackb(frames_of(message)[0])
    assert list(envelope) == ["type", "request_id", "seq", "payload"]
    assert (envelope["type"], envelope["request_id"], envelope["seq"]) == (message.TYPE, "2a", 7)
    assert envelope["payload"].keys() == set(message.__struct_fields__)


def test_type_names_are_in_the_style_of_the_wire() -> None:
    assert all(name == name.upper() == kind.TYPE for name, kind in BY_TYPE.items())


def test_a_payload_may_grow_a_field_that_this_version_does_not_know() -> None:
    packet = Decoder().feed(frame("PING", {"sent_us": 5, "added_later": True}))
    assert packet is not None
    assert packet.message == Ping(5)


@pytest.mark.parametrize("kind", [RunPrefill, RunDecode])
@pytest.mark.parametrize("extra", [-4, 0, 4, CHUNK_BYTES, CHUNK_BYTES + 4, 5 * CHUNK_BYTES])
def test_a_large_tensor_travels_in_chunks_of_one_size(kind: type[RunPrefill], extra: int) -> None:
    data = bytes(i % 251 for i in range(CHUNK_BYTES + extra))
    message = kind(3, [Segment(1, 0, 1, 1)], Tensor("fp32", 1, len(data) // 4, data), [9])
    frames = frames_of(message)
    envelopes = [msgpack.unpackb(one) for one in frames]
    pieces = [envelopes[0]["payload"]["hidden"][3], *(envelope["payload"]["data"] for envelope in envelopes[1:])]
    assert [envelope["type"] for envelope in envelopes] == [kind.TYPE] + ["CHUNK"] * (len(frames) - 1)
    assert {envelope["request_id"] for envelope in envelopes} == {"2a"}
    assert all(len(piece) == CHUNK_BYTES for piece in pieces[:-1])
    assert 0 < len(pieces[-1]) <= CHUNK_BYTES
    assert max(map(len, frames)) < CHUNK_BYTES + 200
    assert b"".join(pieces) == data
    assert decoded(frames) == Packet(message, "2a", 7)


def test_a_link_takes_tensor_after_tensor() -> None:
    decoder = Decoder()
    for value in range(3):
        data = bytes([value]) * (3 * CHUNK_BYTES)
        message = HiddenState(1, Tensor("fp16", 3, CHUNK_BYTES // 2, data), [])
        *early, last = frames_of(message)
        assert all(decoder.feed(one) is None for one in early)
        assert decoder.feed(last) == Packet(message, "2a", 7)
        assert decoder.feed(frames_of(Ping(value))[0]) == Packet(Ping(value), "2a", 7)


def test_what_is_too_large_for_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="too large to send"):
        assignment = next(message for message in EXAMPLES if isinstance(message, Assignment))
        files = {f"{number:0250}": bytes(32) for number in range(MAX_FRAME_BYTES // 256)}
        proof = msgspec.structs.replace(SHARD.proof, files=files)
        frames_of(msgspec.structs.replace(assignment, shard=msgspec.structs.replace(SHARD, proof=proof)))


NO_MESSAGE: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\xc1\xff\x00garbage",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "cut short": frames_of(EXAMPLES[0])[0][:-3],
    "too long": frames_of(Ping(1))[0] + b"\x00",
    "deep nesting": b"\x91" * 300_000 + b"\x00",
    "deep nesting in a config": frame("PING", {})[:-1] + b"\x81\xa1x" * 100_000 + b"\x00",
    "an array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "bytes of 2^32 - 1": b"\xc6\xff\xff\xff\xff",
    "an array": msgpack.packb(["PING", "", 1, {"sent_us": 1}]),
    "an extension type": msgpack.packb(msgpack.ExtType(5, b"abc")),
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "no type": msgpack.packb({"request_id": "", "seq": 1, "payload": {}}),
    "no payload": msgpack.packb({"type": "PING", "request_id": "", "seq": 1}),
    "a fifth key": frame("PING", {"sent_us": 1}, extra=1),
    "a key that is a number": msgpack.packb({1: 2}),
    "a type that is a number": frame("PING", {"sent_us": 1}, type=7),
    "a payload that is a list": frame("PING", [1]),
    "a seq that is text": frame("PING", {"sent_us": 1}, seq="1"),
    "a frame that is too large": frame("CHUNK", {"data": bytes(MAX_FRAME_BYTES)}),
}


@pytest.mark.parametrize("data", NO_MESSAGE.values(), ids=NO_MESSAGE.keys())
def test_a_frame_that_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(data)


@pytest.mark.parametrize("kind", ["NOSUCH", "ping", "", "MESSAGE", "RUN", "X" * 10_000])
def test_an_unknown_type_is_named_and_refused(kind: str) -> None:
    with pytest.raises(ProtocolError, match="unknown type") as refusal:
        Decoder().feed(frame(kind, {}))
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TYPE)
def test_every_required_field_is_required(message: Message) -> None:
    payload = msgpack.unpackb(frames_of(message)[0])["payload"]
    required = [field.encode_name for field in msgspec.structs.fields(message) if field.required]
    assert required
    for name in required:
        missing = {key: value for key, value in payload.items() if key != name}
        with pytest.raises(ProtocolError, match=f"`{name}`"):
            Decoder().feed(frame(message.TYPE, missing))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TYPE)
@pytest.mark.parametrize("wrong", [{"a": {}}, [[]], b"\x00\x01", "x" * 5000, 2**63, -1], ids=repr)
def test_no_field_takes_a_value_of_another_kind(message: Message, wrong: Any) -> None:
    payload = msgpack.unpackb(frames_of(message)[0])["payload"]
    for name in payload:
        if (name, type(wrong)) in {("protocol", int), ("seconds", int), ("padding", bytes)}:
            continue
        with pytest.raises(ProtocolError):
            Decoder().feed(frame(message.TYPE, {**payload, name: wrong}))


@pytest.mark.parametrize(
    "payload",
    [
        {"hop": -1, "sessions": []},
        {"hop": 2**63, "sessions": []},
        {"hop": 1.5, "sessions": []},
        {"hop": 1, "sessions": [-1]},
        {"hop": 1, "sessions": [0] * 5000},
        {"hop": None, "sessions": []},
    ],
    ids=["negative", "huge", "no integer", "negative inside", "too many", "null"],
)
def test_numbers_and_lengths_have_limits(payload: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="CLEAR_CACHE"):
        Decoder().feed(frame("CLEAR_CACHE", payload))


def test_an_assignment_has_a_digest_for_each_layer() -> None:
    assignment = next(message for message in EXAMPLES if isinstance(message, Assignment))
    payload = msgpack.unpackb(frames_of(assignment)[0])["payload"]
    with pytest.raises(ProtocolError, match="5 digests of layers"):
        Decoder().feed(frame("ASSIGNMENT", {**payload, "shard": {**payload["shard"], "layer_start": 3}}))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": -1},
        {"rows": 2**20 + 1},
        {"width": 2**62},
        {"rows": "1"},
        {"dtype": 4},
        {"data": [0] * 8},
        {"data": bytes(12)},
        {"rows": 0, "data": b"\x00"},
        {"dtype": "int8", "data": b"\x00"},
    ],
    ids=repr,
)
def test_a_tensor_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(frame("RUN_PREFILL", run_payload(**changes)))


@pytest.mark.parametrize(
    "segments", [[], [[1, 0, 0, 0]], [[1, -1, 1, 1]], [[1, 0, 1]], [1, 0, 1, 1], [[1, 0, 1, 2]]], ids=repr
)
def test_segments_are_checked(segments: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(frame("RUN_DECODE", {**run_payload(), "segments": segments}))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("HELLO", {"protocol": PROTOCOL_VERSION + 1, "id": "of a new kind"}),
        ("HELLO", {"protocol": 0, "node_id": 7, "devices": None}),
        ("PEER_HELLO", {"protocol": PROTOCOL_VERSION + 1}),
    ],
)
def test_of_a_greeting_in_another_version_the_version_is_read(kind: str, payload: dict[str, Any]) -> None:
    packet = Decoder().feed(msgpack.packb({"type": kind, "request_id": "", "seq": 1, "payload": payload}))
    assert packet is not None
    assert isinstance(packet.message, (Hello, PeerHello))
    assert (packet.message.TYPE, packet.message.protocol) == (kind, payload["protocol"])


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("HELLO", {"protocol": PROTOCOL_VERSION}),
        ("HELLO", {"protocol": "2"}),
        ("HELLO", {"protocol": False}),
        ("HELLO", {}),
        ("HELLO_ACK", {"protocol": PROTOCOL_VERSION + 1, "core_version": 1}),
    ],
)
def test_other_messages_that_do_not_read_are_refused(kind: str, payload: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=f"a {kind} came that does not read"):
        Decoder().feed(msgpack.packb({"type": kind, "request_id": "", "seq": 1, "payload": payload}))


def test_an_announced_tensor_takes_memory_only_as_it_comes() -> None:
    beyond = frame("RUN_PREFILL", run_payload(rows=2**20, width=2**20))
    largest = frame("RUN_PREFILL", run_payload(rows=2**16, width=MAX_TENSOR_BYTES // 4 // 2**16))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="bytes is announced"):
            Decoder().feed(beyond)
        decoder = Decoder()
        assert decoder.feed(largest) is None
        assert decoder.feed(frame("CHUNK", {"data": bytes(1000)})) is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_chunk_needs_a_beginning() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="continues no tensor"):
        decoder.feed(frame("CHUNK", {"data": b"abc"}))
    assert decoder.feed(frame("RUN_DECODE", run_payload())) is not None
    with pytest.raises(ProtocolError, match="continues no tensor"):
        decoder.feed(frame("CHUNK", {"data": b"abc"}))


def test_nothing_comes_between_the_chunks_of_a_tensor() -> None:
    decoder = Decoder()
    assert decoder.feed(frame("RUN_DECODE", run_payload(data=bytes(4)))) is None
    with pytest.raises(ProtocolError, match="a PING came before the end of a tensor"):
        decoder.feed(frame("PING", {"sent_us": 1}))


@pytest.mark.parametrize("size", [0, 5], ids=["empty", "beyond the end"])
def test_a_chunk_must_fit(size: int) -> None:
    decoder = Decoder()
    assert decoder.feed(frame("RUN_DECODE", run_payload(data=bytes(4)))) is None
    with pytest.raises(ProtocolError, match="does not fit"):
        decoder.feed(frame("CHUNK", {"data": bytes(size)}))
