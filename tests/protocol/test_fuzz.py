"""Whatever bytes come: a message or a ProtocolError, and never much memory. The seed is fixed.

CORE_FUZZ=100 makes 100 times as many cases.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import trio
from msgspec import inspect

from core.coordinator.enrolment import Enrolment
from core.coordinator.members import Member, Members
from core.coordinator.routes import Routes
from core.coordinator.server import NodeServer
from core.errors import ChannelClosed, ConfigError, ProtocolError, TrustError
from core.interfaces.transport import Channel
from core.protocol.codec import BY_TYPE, Decoder, Packet, encode
from core.protocol.fields import Proof, Segment, Shard, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Challenge,
    Error,
    Hello,
    HiddenState,
    Message,
    Ping,
    Pong,
    RunDecode,
    RunPrefill,
    StandBy,
)
from core.protocol.tensors import from_wire
from core.testing.contracts import HOST
from core.testing.transport import MemoryTransport
from core.trust.identity import Identity
from core.trust.link import InviteLink
from core.trust.proof import signature, verified
from core.trust.register import Register
from core.trust.state_dir import StateDir

TIMES = int(os.environ.get("CORE_FUZZ", "1"))
MUTANTS = 40_000 * TIMES
PROOFS = 10_000 * TIMES
GREETINGS = 1_000 * TIMES
INVITES = 10_000 * TIMES
SECONDS = 300 * TIMES
LONGEST_LIFE = 40
"""Frames that one decoder is fed at most, for a link that breaks the protocol is cut off."""
MEMORY = 16 * 2**20
BAD_VALUES = [None, True, -1, 2**63, 2**64 - 1, 1e308, float("nan"), "", "x" * 300, b"", b"\x00" * 17, [], [[]], {}]
PROOF = Proof(bytes(32), {"config.json": bytes(32)}, {"model.gguf": bytes(32)}, [bytes(32), b""] * 2)
SHARD = Shard("m", None, "llama", "fp16", "fp16", 0, 4, 10, PROOF, 2)
WHOLE: list[Message] = [
    Assignment(1, 2, SHARD, "fp32", bytes(16)),
    StandBy(3, SHARD, True),
    RunPrefill(1, [Segment(1, 0, 2, 1)], Tensor("fp32", 2, 8, bytes(range(64))), []),
    RunDecode(1, [Segment(1, 5, 1, 1), Segment(2, 9, 1, 1)], Tensor("fp32", 2, 8, bytes(range(64))), [5]),
    RunPrefill(1, [Segment(1, 0, 2, 1)], Tensor("fp16", 2**10, 2**9, bytes(2**20)), []),
]
"""Whose parts fit each other."""


def example(rng: random.Random, kind: type[Message]) -> Message:
    """A message whose every field is as its type says."""
    return msgspec.convert(value(rng, inspect.type_info(kind)), kind, strict=False)


def value(rng: random.Random, kind: inspect.Type) -> Any:
    match kind:
        case inspect.IntType():
            return rng.randint(int(kind.ge or 0), min(int(kind.le or 9), 99))
        case inspect.StrType():
            return rng.choice(["", "a", "zoë", "x" * 200])
        case inspect.BytesType():
            return rng.randbytes(rng.randint(kind.min_length or 0, min(kind.max_length or 64, 300)))
        case inspect.ListType():
            return [value(rng, kind.item_type) for _ in range(rng.randint(kind.min_length or 0, 3))]
        case inspect.DictType():
            return {f"k{n}": value(rng, kind.value_type) for n in range(rng.randint(0, 3))}
        case inspect.UnionType():
            return value(rng, rng.choice(kind.types))
        case inspect.StructType():
            fields = {field.name: value(rng, field.type) for field in kind.fields}
            return list(fields.values()) if kind.array_like else fields
    return PLAIN[type(kind)](rng)


PLAIN: dict[type, Callable[[random.Random], Any]] = {
    inspect.BoolType: lambda rng: rng.random() < 0.5,
    inspect.FloatType: lambda rng: rng.random(),
    inspect.NoneType: lambda rng: None,
    inspect.AnyType: lambda rng: rng.choice([1, "b", [1, {"c": None}]]),
}


def examples(rng: random.Random) -> Iterator[Message]:
    yield from WHOLE
    for kind in BY_TYPE.values():
        for _ in range(20):
            try:
                yield example(rng, kind)
            except msgspec.ValidationError:
                continue  # a rule between fields, such as no more outputs than rows


def test_every_type_has_examples() -> None:
    assert {message.TYPE for message in examples(random.Random(1))} == set(BY_TYPE)


def mutants(rng: random.Random) -> Iterator[bytes]:
    frames = [frame for message in examples(rng) for frame in encode(Packet(message, "1f", 3))]
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


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_no_proof_but_the_right_one_holds() -> None:
    rng, identity = random.Random(1), Identity.fresh()
    nonce, listener = rng.randbytes(32), rng.randbytes(32)
    right = (identity.certificate, signature(identity, "node", nonce, listener))
    assert verified("node", *right, nonce, listener) == identity.fingerprint
    for _ in range(PROOFS):
        certificate, proof = (with_bytes_changed(rng, part) if rng.random() < 0.6 else part for part in right)
        if (certificate, proof) != right:
            with_no_trust(certificate, proof, nonce, listener, identity.fingerprint)


def with_no_trust(certificate: bytes, proof: bytes, nonce: bytes, listener: bytes, known: bytes) -> None:
    """A certificate may be changed where its key isn't: then it is another one, which nobody knows."""
    try:
        assert verified("node", certificate, proof, nonce, listener) != known
    except TrustError:
        return


def test_no_text_but_an_invite_reads_as_one() -> None:
    rng = random.Random(1)
    link = InviteLink(("10.0.0.1", "2001:db8::1", "a.example"), 7001, rng.randbytes(32), rng.randbytes(16), 2**31)
    read = 0
    for _ in range(INVITES):
        mutant = with_bytes_changed(rng, str(link).encode()).decode(errors="replace")
        try:
            assert InviteLink.parse(mutant) == link
            read += 1
        except ConfigError:
            continue
    assert read < INVITES // 20, "only what base64 does not see may be changed"


class Quiet(Routes):
    """Routes that must hear of nobody."""

    async def take(self, member: Member, packet: Packet) -> None:
        pytest.fail(f"{packet.message} was taken")

    def member_left(self, member: Member) -> None:
        pytest.fail(f"{member.node_id} left")


async def test_no_greeting_lets_a_stranger_in(tmp_path: Path) -> None:
    state, transport, rng = StateDir.open(tmp_path / "state"), MemoryTransport(), random.Random(1)
    coordinator, stranger = Identity.open(state), Identity.fresh()
    members, others = Members(), [message for message in examples(rng) if not isinstance(message, Ping | Pong)]
    server = NodeServer(members, Quiet(), Enrolment(coordinator, Register(state), state))
    listen = partial(transport.listen, credentials=coordinator.credentials())
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(listen, HOST, 0, server.serve)
            for _ in range(GREETINGS):
                await greet(rng, others, transport, port, coordinator.fingerprint, stranger)
            nursery.cancel_scope.cancel()
    assert members.all() == []


async def greet(
    rng: random.Random,
    others: list[Message],
    transport: MemoryTransport,
    port: int,
    listener: bytes,
    stranger: Identity,
) -> None:
    """With what may be a greeting, changed a little, or any other message. Returns when it was refused."""
    async with transport.dial(HOST, port, timeout=SECONDS, pin=listener) as channel:
        challenge = await spoken(channel)
        assert isinstance(challenge, Challenge)
        proof = signature(stranger, "node", challenge.nonce, listener)
        hello = Hello(PROTOCOL_VERSION, "s", certificate=stranger.certificate, signature=proof, invite=bytes(16))
        first = hello if rng.random() < 0.8 else rng.choice(others)
        frame = next(iter(encode(Packet(first))))
        change = rng.choice([with_bytes_changed, with_a_value_changed, lambda _, same: same])
        await channel.send(change(rng, frame))
        try:
            answer = await spoken(channel)
        except ChannelClosed:
            return
        assert isinstance(answer, Error), answer


async def spoken(channel: Channel) -> Message:
    """The next message but heartbeats."""
    while True:
        packet = Decoder().feed(await channel.receive())
        assert packet is not None
        if not isinstance(packet.message, Ping | Pong):
            return packet.message
