"""The whole vocabulary of the wire: one frozen type per message. Field limits are checked at decoding."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec

PROTOCOL_VERSION = 1
"""Raised when a message changes in a way that an older peer would misread; peers must speak the same."""

MAX_TEXT = 4096
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
"""By which a text from elsewhere could steer the terminal that it is shown in."""
_HARMLESS = rf"^[^{_CONTROLS}]*\Z"
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=_HARMLESS)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=_HARMLESS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Layer = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Commitment = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""SHA-256 of a certificate."""
Certificate = Annotated[bytes, msgspec.Meta(min_length=64, max_length=2048)]
Signature = Annotated[bytes, msgspec.Meta(min_length=8, max_length=256)]


def clipped(text: object) -> str:
    """`text`, an error's for instance, as far as a `Text` field takes it."""
    return re.sub(f"[{_CONTROLS}]", "\N{REPLACEMENT CHARACTER}", str(text)[:MAX_TEXT])


class Message(msgspec.Struct, frozen=True):
    """A payload; `TYPE` is its name in the envelope."""

    TYPE: ClassVar[str]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Rows of hidden states: raw little-endian bytes of `rows` x `width` values of `dtype` (fp16, bf16, fp32).

    `data` is read-only in spirit: on this side of the wire it may be a view of a torch tensor or a bytearray.
    """

    dtype: Name
    rows: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    width: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    data: bytes


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`rows` consecutive rows of `session` from `position` on, of which the last `outputs` are wanted back.

    A segment that starts before the end of the session's cache truncates it (rollback, replay, speculation); one
    that starts past the end is an error; one at 0 begins the session.
    """

    session: Count
    position: Count
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    outputs: Annotated[int, msgspec.Meta(ge=0, le=2**20)]

    def __post_init__(self) -> None:
        if self.outputs > self.rows:
            raise ValueError(f"{self.outputs} outputs of {self.rows} rows")


class Device(msgspec.Struct, frozen=True):
    """A device of a node, with its memory in bytes."""

    id: Name
    type: Name
    name: Name
    total_memory: Count


class Challenge(Message, frozen=True):
    """A listener's first message on an encrypted link: the greeting that comes signs this nonce."""

    TYPE: ClassVar = "CHALLENGE"
    nonce: Nonce


class Hello(Message, frozen=True):
    """Node to coordinator, first: who it is and what it offers. Refused by ERROR, accepted by HELLO_ACK.

    `paused` is why it takes no layers for now; "" where it does.
    On an encrypted link `signature` proves that the node holds the key of `certificate`; `invite` is the secret of an
    invite, from a node whose key the coordinator does not know yet. Without one, `asks` asks the host to be let in: the
    commitment to a nonce (core.trust.asking). Answered by ASKING.
    """

    TYPE: ClassVar = "HELLO"
    protocol: int
    node_id: Name
    hostname: Name = ""
    core_version: Name = ""
    python_version: Name = ""
    torch_version: Name = ""
    platform: Name = ""
    devices: Annotated[list[Device], msgspec.Meta(max_length=64)] = []
    selected_device: Name = "cpu"
    max_memory_bytes: Count | None = None
    free_memory: Count = 0
    peer_hosts: Annotated[list[Name], msgspec.Meta(max_length=16)] = []
    peer_port: Port = 0
    plugins: Annotated[dict[Name, Name], msgspec.Meta(max_length=256)] = {}
    paused: Text = ""
    certificate: Certificate | None = None
    signature: Signature | None = None
    invite: Secret | None = None
    asks: Commitment | None = None


class Asking(Message, frozen=True):
    """Coordinator to node: the host is asked. With this nonce and the node's own both make the code that they show.

    Answered by REVEAL; then, as the host decides, HELLO_ACK or ERROR.
    """

    TYPE: ClassVar = "ASKING"
    nonce: Nonce


class Reveal(Message, frozen=True):
    """Node to coordinator: the nonce that its HELLO committed to."""

    TYPE: ClassVar = "REVEAL"
    nonce: Nonce


class HelloAck(Message, frozen=True):
    """`node_id` is what the node is called here; "" for what it called itself."""

    TYPE: ClassVar = "HELLO_ACK"
    protocol: int
    core_version: Name = ""
    node_id: Name = ""


class Error(Message, frozen=True):
    """A refusal, or the reason for which the sender is about to close the link."""

    TYPE: ClassVar = "ERROR"
    code: Name
    message: Text


class Proof(msgspec.Struct, frozen=True):
    """What a node has to prove of its copy of the model before it serves: SHA-256 digests (core.runtime.manifest).

    Of `files` they are of whole files, of `rests` of what lies between a file's tensors; `layers` has one per layer
    of the range. Empty ones aren't known, or proven by others.
    """

    manifest: Digest
    files: Annotated[dict[Name, Digest], msgspec.Meta(max_length=4096)]
    rests: Annotated[dict[Name, Digest], msgspec.Meta(max_length=4096)]
    layers: Annotated[list[Digest], msgspec.Meta(max_length=4096)]


class Assignment(Message, frozen=True):
    """Coordinator to node: load this layer range. `link_token` is what its downstream peer will show it, `downstream`
    whose certificate it will prove to hold where the link between them is encrypted.

    `revision` is the coordinator's own where the model comes from a hub. A node that already holds the very same
    stage, of a model of the same manifest, keeps its weights and starts the epoch with empty caches. `parity_layer` is
    which of its layers the node computes on a fixed input, beside the operations of core.parity.
    """

    TYPE: ClassVar = "ASSIGNMENT"
    epoch: Count
    model_id: Text
    revision: Name | None
    architecture: Name
    quant: Name
    compute_dtype: Name
    wire_dtype: Name
    layer_start: Layer
    layer_end_exclusive: Layer
    is_last: bool
    total_weight_bytes: Count
    proof: Proof
    parity_layer: Layer | None
    link_token: Secret
    downstream: Fingerprint | None = None

    def __post_init__(self) -> None:
        if len(self.proof.layers) != self.layer_end_exclusive - self.layer_start:
            raise ValueError(f"{len(self.proof.layers)} digests of layers")
        if self.parity_layer is not None and not self.layer_start <= self.parity_layer < self.layer_end_exclusive:
            raise ValueError(f"layer {self.parity_layer} is none of them")


class LoadProgress(Message, frozen=True):
    """Bytes done and in all of a phase: download, verify, load or compile."""

    TYPE: ClassVar = "LOAD_PROGRESS"
    epoch: Count
    phase: Name
    done: Count
    total: Count


class LoadComplete(Message, frozen=True):
    """`weight_bytes` are held, `read_bytes` were read from the checkpoint (0 where the stage was kept).

    Beside them the node's memory holds the KV cache of `kv_tokens` tokens. `parity` is what core.parity computes on
    this node, by operation.
    """

    TYPE: ClassVar = "LOAD_COMPLETE"
    epoch: Count
    weight_bytes: Count
    read_bytes: Count
    kv_tokens: Count
    seconds: float
    parity: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=16384)]], msgspec.Meta(max_length=64)] = {}


class LoadFailed(Message, frozen=True):
    TYPE: ClassVar = "LOAD_FAILED"
    epoch: Count
    reason: Text


class ConnectPeer(Message, frozen=True):
    """Coordinator to node: dial your upstream neighbour, which hands you its hidden states from then on.

    `fingerprint` is that of its certificate.
    """

    TYPE: ClassVar = "CONNECT_PEER"
    epoch: Count
    hosts: Annotated[list[Name], msgspec.Meta(max_length=16)]
    port: Port
    link_token: Secret
    fingerprint: Fingerprint | None = None


class PeerConnected(Message, frozen=True):
    """The answer: whether the link stands. Where it doesn't, `reason` says why, and the coordinator relays."""

    TYPE: ClassVar = "PEER_CONNECTED"
    epoch: Count
    direct: bool
    reason: Text


class PeerHello(Message, frozen=True):
    """Node to node, first. Answered by HELLO_ACK or ERROR. Certificate and signature as in HELLO."""

    TYPE: ClassVar = "PEER_HELLO"
    protocol: int
    epoch: Count
    link_token: Secret
    certificate: Certificate | None = None
    signature: Signature | None = None


class PeerLost(Message, frozen=True):
    """A node's link to a neighbour of the route ended."""

    TYPE: ClassVar = "PEER_LOST"
    epoch: Count
    reason: Text


class Release(Message, frozen=True):
    """Coordinator to node: you are spare; drop the stage and its caches."""

    TYPE: ClassVar = "RELEASE"
    epoch: Count


class Pause(Message, frozen=True):
    """Node to coordinator: no layers for me, for this reason; "" ends the pause. `leaves`: a LEAVE comes next.

    Answered by RELEASE, once nobody is served by what the node holds.
    """

    TYPE: ClassVar = "PAUSE"
    reason: Text
    leaves: bool = False


class Leave(Message, frozen=True):
    """Either way, last: the sender ends the link on purpose."""

    TYPE: ClassVar = "LEAVE"
    reason: Text


class NodeState(Message, frozen=True):
    """What a node holds now; sent when it changes."""

    TYPE: ClassVar = "NODE_STATE"
    sessions: Count
    kv_tokens: Count
    kv_bytes: Count
    free_memory: Count


class Ping(Message, frozen=True):
    TYPE: ClassVar = "PING"
    sent_us: Count


class Pong(Message, frozen=True):
    """Answers PING, with its `sent_us`."""

    TYPE: ClassVar = "PONG"
    sent_us: Count


class Run(Message, frozen=True):
    """A batch on its way through the stages.

    `compute_us` and `queue_us` grow by one entry per stage that it has passed: how long that computed it, and how long
    it waited there for its turn.
    """

    epoch: Count
    segments: Annotated[list[Segment], msgspec.Meta(min_length=1, max_length=4096)]
    hidden: Tensor
    compute_us: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []
    queue_us: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []


class RunPrefill(Run, frozen=True):
    TYPE: ClassVar = "RUN_PREFILL"


class RunDecode(Run, frozen=True):
    """As RUN_PREFILL, with one row (or a few, when verifying a draft) per session."""

    TYPE: ClassVar = "RUN_DECODE"


class HiddenState(Message, frozen=True):
    """The last stage's answer to a RUN: the wanted rows of all segments, in order."""

    TYPE: ClassVar = "HIDDEN_STATE"
    epoch: Count
    hidden: Tensor
    compute_us: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []
    queue_us: Annotated[list[Count], msgspec.Meta(max_length=1024)] = []


class InferenceError(Message, frozen=True):
    """A stage's answer to a RUN that it could not compute."""

    TYPE: ClassVar = "INFERENCE_ERROR"
    epoch: Count
    message: Text


class CacheOrder(Message, frozen=True):
    """Has to do with caches. Travels the route like the data, so that it can't overtake a batch of the same session."""

    epoch: Count


class CopyCache(CacheOrder, frozen=True):
    """Begins the session `target` with the first `length` tokens of `source`, which keeps its own."""

    TYPE: ClassVar = "COPY_CACHE"
    source: Count
    target: Count
    length: Count


class ClearCache(CacheOrder, frozen=True):
    """Frees sessions.

    Without sessions it frees all of the stage that gets it, and travels no further: the route is broken.
    """

    TYPE: ClassVar = "CLEAR_CACHE"
    sessions: Annotated[list[Count], msgspec.Meta(max_length=4096)]


class Chunk(Message, frozen=True):
    """The next bytes of the tensor whose message came before, on the same link."""

    TYPE: ClassVar = "CHUNK"
    data: bytes


def _leaves(base: type[Message]) -> list[type[Message]]:
    return [leaf for sub in base.__subclasses__() for leaf in (_leaves(sub) or [sub])]


BY_TYPE: dict[str, type[Message]] = {message.TYPE: message for message in _leaves(Message)}
