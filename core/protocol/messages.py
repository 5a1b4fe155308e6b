"""The whole vocabulary of the wire: one frozen type per message. Field limits are checked at decoding."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from core.protocol.fields import (
    MAX_STAGES,
    AllOnDisk,
    Certificate,
    Commitment,
    Count,
    Fingerprint,
    Holdings,
    Label,
    LayerTimes,
    Name,
    Nonce,
    PeerLink,
    Plugins,
    Port,
    Secret,
    Segment,
    Shard,
    Signature,
    Tensor,
    Text,
)

PROTOCOL_VERSION = 3
"""Raised when a message changes in a way that an older peer would misread; peers must speak the same."""


class Message(msgspec.Struct, frozen=True):
    """A payload; `TYPE` is its name in the envelope."""

    TYPE: ClassVar[str]


class Challenge(Message, frozen=True):
    """A listener's first message on an encrypted link: the greeting that comes signs this nonce."""

    TYPE: ClassVar = "CHALLENGE"
    nonce: Nonce


class Hello(Message, frozen=True):
    """Node to coordinator, first: who it is and what it offers. Refused by ERROR, accepted by HELLO_ACK.

    `paused` is why it takes no layers for now; "" where it does. `speed` is how many bytes of weights its device was
    measured to multiply with one row in a second, `chunk_speed` with CHUNK_ROWS rows (0: not measured); `layer_times`
    are those that it has had to do with. `holdings` is what it has in memory from before, `on_disk` what it need not
    download, and `load_speed` how many bytes a second of that it loads (0: not known). `labels` are its owner's words
    for it, for planners; `plugins` add architectures, quantizers or formats, and `installer` (core.installing) others.
    `local_token` proves that the coordinator started it as a process of its own machine. On an encrypted link
    `signature` proves that it holds the key of `certificate`; `invite` is the secret of an invite, from a node whose
    key the coordinator does not know yet. Without one, `asks` asks the host to be let in, by the commitment to a nonce
    (core.trust.asking): answered by ASKING.
    """

    TYPE: ClassVar = "HELLO"
    protocol: int
    node_id: Name
    hostname: Name = ""
    core_version: Name = ""
    selected_device: Name = "cpu"
    max_memory_bytes: Count | None = None
    free_memory: Count = 0
    speed: Count = 0
    chunk_speed: Count = 0
    layer_times: LayerTimes = []
    holdings: Holdings = []
    on_disk: AllOnDisk = []
    load_speed: Count = 0
    labels: Annotated[list[Label], msgspec.Meta(max_length=16)] = []
    plugins: Plugins = []
    installer: Name = ""
    peer_hosts: Annotated[list[Name], msgspec.Meta(max_length=16)] = []
    peer_port: Port = 0
    paused: Text = ""
    local_token: Secret | None = None
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


class ErrorCode(StrEnum):
    """What an ERROR is about. A peer may send others."""

    PROTOCOL = "protocol"
    PROTOCOL_VERSION = "protocol_version"
    NOT_A_NODE = "not_a_node"
    NOT_A_MEMBER = "not_a_member"
    REPLACED = "replaced"
    SAME_KEY = "same_key"
    REMOVED = "removed"
    NOT_A_PEER = "not_a_peer"
    OTHER_HOP = "other_hop"
    WRONG_TOKEN = "wrong_token"
    NO_PROOF = "no_proof"
    OTHER_KEY = "other_key"


class Error(Message, frozen=True):
    """A refusal, or the reason for which the sender is about to close the link. `code` is an ErrorCode's value."""

    TYPE: ClassVar = "ERROR"
    code: Name
    message: Text


class Assignment(Message, frozen=True):
    """Coordinator to node: be the hop `hop` of a route, with the layers of `shard`. Ended by RELEASE.

    A hop's number is the coordinator's, and never used twice. Messages to a hop carry it, and so do a hop's answers.
    The hop hands on to `next_hop`; None: it is the last one, and answers the coordinator. `link_token` is what its
    downstream peer will show it, `downstream` whose certificate that will prove to hold where the link between them is
    encrypted. `kv_dtype` is what its KV caches hold. Layers that the node holds already, of the same manifest,
    quantizer and dtype, are not loaded again.
    """

    TYPE: ClassVar = "ASSIGNMENT"
    hop: Count
    next_hop: Count | None
    shard: Shard
    wire_dtype: Name
    link_token: Secret
    downstream: Fingerprint | None = None
    kv_dtype: Name = "auto"


class StandBy(Message, frozen=True):
    """Coordinator to node: have the files of `shard` on disk, and with `in_memory` hold its layers, for a later hop.

    Answered like an ASSIGNMENT, under the number `hop`, which no route has.
    """

    TYPE: ClassVar = "STAND_BY"
    hop: Count
    shard: Shard
    in_memory: bool


class KeepLayers(Message, frozen=True):
    """Coordinator to node: let go of all layers but these and those that your hops use. Answered by NODE_STATE."""

    TYPE: ClassVar = "KEEP_LAYERS"
    holdings: Holdings


class LeftOut(Message, frozen=True):
    """Coordinator to node: you get no layers as you are, for lack of a plugin."""

    TYPE: ClassVar = "LEFT_OUT"
    reason: Text


class LoadProgress(Message, frozen=True):
    """Bytes done and in all of a phase: download, verify, load or compile."""

    TYPE: ClassVar = "LOAD_PROGRESS"
    hop: Count
    phase: Name
    done: Count
    total: Count


class LoadComplete(Message, frozen=True):
    """The hop's layers take `weight_bytes`; `read_bytes` were read from the checkpoint (0 where all were held).

    A NODE_STATE comes before it. `parity` is what core.parity computes on this node, by operation.
    """

    TYPE: ClassVar = "LOAD_COMPLETE"
    hop: Count
    weight_bytes: Count
    read_bytes: Count
    seconds: float
    parity: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=16384)]], msgspec.Meta(max_length=64)] = {}


class LoadFailed(Message, frozen=True):
    TYPE: ClassVar = "LOAD_FAILED"
    hop: Count
    reason: Text


class ConnectPeer(Message, frozen=True):
    """Coordinator to the hop `hop`: dial the node of your upstream neighbour, the hop `upstream`, which hands you its
    hidden states from then on.

    `fingerprint` is that of its certificate.
    """

    TYPE: ClassVar = "CONNECT_PEER"
    hop: Count
    upstream: Count
    hosts: Annotated[list[Name], msgspec.Meta(max_length=16)]
    port: Port
    link_token: Secret
    fingerprint: Fingerprint | None = None


class PeerConnected(Message, frozen=True):
    """The answer: whether the link stands. Where it doesn't, `reason` says why, and the coordinator relays."""

    TYPE: ClassVar = "PEER_CONNECTED"
    hop: Count
    direct: bool
    reason: Text


class PeerHello(Message, frozen=True):
    """Node to node, first: for a link from `hop`, whose node is dialled. Answered by HELLO_ACK or ERROR.

    Certificate and signature as in HELLO.
    """

    TYPE: ClassVar = "PEER_HELLO"
    protocol: int
    hop: Count
    link_token: Secret
    certificate: Certificate | None = None
    signature: Signature | None = None


class PeerLost(Message, frozen=True):
    """The link of the hop `hop` to a neighbour ended."""

    TYPE: ClassVar = "PEER_LOST"
    hop: Count
    reason: Text


class Release(Message, frozen=True):
    """Coordinator to node: the hop `hop` ends, with all that it caches. Its layers stay held: see KEEP_LAYERS."""

    TYPE: ClassVar = "RELEASE"
    hop: Count


class Pause(Message, frozen=True):
    """Node to coordinator: no layers for me, for this reason; "" ends the pause. `leaves`: a LEAVE comes next.

    Answered by KEEP_LAYERS of none, once nobody is served by what the node holds.
    """

    TYPE: ClassVar = "PAUSE"
    reason: Text
    leaves: bool = False


class Leave(Message, frozen=True):
    """Either way, last: the sender ends the link on purpose."""

    TYPE: ClassVar = "LEAVE"
    reason: Text


class NodeState(Message, frozen=True):
    """What a node holds now, for all its hops; sent when it changes.

    `kv_room` is how many bytes of KV cache its memory has room for beside the layers that it holds, those that are
    filled included: it is measured when layers come or go. `layer_times` are those of its hops' layers, if they were
    timed: what serving has shown of late, or else what was found when they had been loaded. `links` are those of its
    hops to the next ones, once they were measured. `on_disk` and `load_speed` as in HELLO.
    """

    TYPE: ClassVar = "NODE_STATE"
    sessions: Count
    kv_tokens: Count
    kv_bytes: Count
    free_memory: Count
    kv_room: Count = 0
    holdings: Holdings = []
    layer_times: LayerTimes = []
    links: Annotated[list[PeerLink], msgspec.Meta(max_length=64)] = []
    on_disk: AllOnDisk = []
    load_speed: Count = 0


class Ping(Message, frozen=True):
    """`padding` has it take as long as its bytes take the network."""

    TYPE: ClassVar = "PING"
    sent_us: Count
    padding: Annotated[bytes, msgspec.Meta(max_length=65536)] = b""


class Pong(Message, frozen=True):
    """Answers PING, with its `sent_us` and its `padding`."""

    TYPE: ClassVar = "PONG"
    sent_us: Count
    padding: Annotated[bytes, msgspec.Meta(max_length=65536)] = b""


class Run(Message, frozen=True):
    """A batch on its way through the stages, now to the hop `hop`.

    `compute_us` and `queue_us` grow by one entry per stage that it has passed: how long that computed it, and how long
    it waited there for its turn.
    """

    hop: Count
    segments: Annotated[list[Segment], msgspec.Meta(min_length=1, max_length=4096)]
    hidden: Tensor
    compute_us: Annotated[list[Count], msgspec.Meta(max_length=MAX_STAGES)] = []
    queue_us: Annotated[list[Count], msgspec.Meta(max_length=MAX_STAGES)] = []


class RunPrefill(Run, frozen=True):
    TYPE: ClassVar = "RUN_PREFILL"


class RunDecode(Run, frozen=True):
    """As RUN_PREFILL, with one row (or a few, when verifying a draft) per session."""

    TYPE: ClassVar = "RUN_DECODE"


class HiddenState(Message, frozen=True):
    """The answer of `hop`, the last one, to a RUN: the wanted rows of all segments, in order."""

    TYPE: ClassVar = "HIDDEN_STATE"
    hop: Count
    hidden: Tensor
    compute_us: Annotated[list[Count], msgspec.Meta(max_length=MAX_STAGES)] = []
    queue_us: Annotated[list[Count], msgspec.Meta(max_length=MAX_STAGES)] = []


class InferenceError(Message, frozen=True):
    """The answer of `hop` to a RUN that it could not compute; `no_room`: for want of memory for KV caches."""

    TYPE: ClassVar = "INFERENCE_ERROR"
    hop: Count
    message: Text
    no_room: bool = False


class CacheCommand(Message, frozen=True):
    """Has the hop `hop`, and those behind it, do something with their caches.

    Travels the route like the data, so that it can't overtake a batch of the same session.
    """

    hop: Count


class CopyCache(CacheCommand, frozen=True):
    """Begins the session `target` with the first `length` tokens of `source`, which keeps its own."""

    TYPE: ClassVar = "COPY_CACHE"
    source: Count
    target: Count
    length: Count


class ClearCache(CacheCommand, frozen=True):
    """Frees sessions."""

    TYPE: ClassVar = "CLEAR_CACHE"
    sessions: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=4096)]


class Chunk(Message, frozen=True):
    """The next bytes of the tensor whose message came before, on the same link."""

    TYPE: ClassVar = "CHUNK"
    data: bytes
