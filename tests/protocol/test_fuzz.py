"""Whatever bytes come: a message or a ProtocolError, and never much memory. The seed is fixed."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import msgpack
import pytest

from core.errors import ProtocolError
from core.protocol.codec import Decoder, Packet, encode
from core.protocol.messages import (
    Assignment,
    ClearCache,
    CopyCache,
    Hello,
    HiddenState,
    NodeState,
    Proof,
    RunDecode,
    RunPrefill,
    Segment,
    Tensor,
)
from core.protocol.tensors import from_wire

MUTANTS = 30_000
LONGEST_LIFE = 40
"""Frames that one decoder is fed at most, for a link that breaks the protocol is cut off."""
MEMORY = 16 * 2**20
BAD_VALUES = [None, True, -1, 2**63, 2**64 - 1, 1e308, float("nan"), "", "x" * 300, b"", b"\x00" * 17, [], [[]], {}]
TOKEN = bytes(16)
PROOF = Proof(bytes(32), {"config.json": bytes(32)}, {"model.gguf": bytes(32)}, [bytes(32), b""] * 2)
HIDDEN = Tensor("fp32", 2, 8, bytes(range(64)))
MESSAGES = [
    Hello(protocol=1, node_id="a", peer_hosts=["h"], plugins={"llama": "1"}),
    Assignment(1, "m", None, "llama", "fp16", "fp16", "fp32", 0, 4, True, 10, PROOF, TOKEN),
    NodeState(1, 2, 3, 4),
    ClearCache(1, [1, 2, 3]),
    CopyCache(1, 2, 3, 4),
    RunPrefill(1, [Segment(1, 0, 2, 1)], HIDDEN, []),
    RunDecode(1, [Segment(1, 5, 1, 1), Segment(2, 9, 1, 1)], HIDDEN, [5]),
    HiddenState(1, HIDDEN, [5, 6]),
    RunPrefill(1, [Segment(1, 0, 2, 1)], Tensor("fp16", 2**10, 2**9, bytes(2**20)), []),
]


def mutants(rng: random.Random) -> Iterator[bytes]:
    frames = [frame for message in MESSAGES for frame in encode(Packet(message, "1f", 3))]
    small = [frame for frame in frames if len(frame) < 2000]
    for _ in range(MUTANTS):
        choice = rng.random()
        if choice < 0.4:
            yield with_bytes_changed(rng, rng.choice(small))
        elif choice < 0.8:
            yield with_a_value_changed(rng, rng.choice(small))
        elif choice < 0.9:
            yield rng.randbytes(rng.randint(0, 200))
        elif choice < 0.99:
            yield rng.choice(small)
        else:
            yield rng.choice(frames)


def with_bytes_changed(rng: random.Random, frame: bytes) -> bytes:
    mutant = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(mutant))
        match rng.randrange(4):
            case 0:
                mutant[at] = rng.randrange(256)
            case 1:
                mutant[at] ^= 1 << rng.randrange(8)
            case 2:
                del mutant[at : at + rng.randint(1, 8)]
            case 3:
                mutant[at:at] = rng.randbytes(rng.randint(1, 8))
        mutant = mutant or bytearray(1)
    return bytes(mutant)


def with_a_value_changed(rng: random.Random, frame: bytes) -> bytes:
    """Somewhere in the tree that the frame is."""
    root = msgpack.unpackb(frame)
    node = root
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if not (isinstance(inner, dict | list) and inner and rng.random() < 0.7):
            break
        node = inner
    if isinstance(inner, int) and rng.random() < 0.5:
        node[key] = rng.choice([inner + 1, inner * 1000, 2**20, 2**32])
    elif isinstance(node, dict) and rng.random() < 0.2:
        del node[key]
    else:
        node[key] = rng.choice(BAD_VALUES)
    return bytes(msgpack.packb(root))


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_but_messages_and_protocol_errors_comes_out(seed: int) -> None:
    rng = random.Random(seed)
    decoder, fed, read, refused = Decoder(), 0, 0, 0
    tracemalloc.start()
    try:
        for mutant in mutants(rng):
            fed += 1
            try:
                packet = decoder.feed(mutant)
                if packet is not None and isinstance(packet.message, RunPrefill | RunDecode | HiddenState):
                    from_wire(packet.message.hidden)
                read += packet is not None
            except ProtocolError:
                refused += 1
                decoder, fed = Decoder(), 0
            if fed > LONGEST_LIFE:
                decoder, fed = Decoder(), 0
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert read > MUTANTS // 10, "the mutants are too wild to reach the fields"
    assert refused > MUTANTS // 10
