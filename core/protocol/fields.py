"""What messages are made of: fields with their limits, which are checked at decoding, and the parts of messages."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from core.one_line import UNSAFE

MAX_TEXT = 4096
MAX_STAGES = 1024
"""That a batch passes at most."""
_HARMLESS = rf"^[^{UNSAFE}]*\Z"
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
    """`text`, an error's for instance, as far as a `Text` field takes it: in one line."""
    line = " ".join(str(text)[:MAX_TEXT].split())
    return re.sub(f"[{UNSAFE}]", "\N{REPLACEMENT CHARACTER}", line)


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


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The layers [start, end)."""

    start: Layer
    end: Layer

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"layers [{self.start}, {self.end})")


class Holding(msgspec.Struct, frozen=True):
    """Layers that a node has in memory, of the checkpoint with this manifest, packed by `quant` to compute in `dtype`.

    They may serve any hop that asks for the very same.
    """

    manifest: Digest
    quant: Name
    dtype: Name
    layers: Annotated[list[Span], msgspec.Meta(max_length=128)]


Holdings = Annotated[list[Holding], msgspec.Meta(max_length=16)]


class OnDisk(msgspec.Struct, frozen=True, array_like=True):
    """Layers of the checkpoint with this manifest whose files a node has read before and still has."""

    manifest: Digest
    layers: Annotated[list[Span], msgspec.Meta(max_length=128)]


AllOnDisk = Annotated[list[OnDisk], msgspec.Meta(max_length=16)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w.-]+\Z")]


class Plugin(msgspec.Struct, frozen=True, array_like=True):
    """What a node has installed: `adds` names what it adds by kind, "architecture llama" for instance."""

    distribution: Name
    version: Name
    adds: Annotated[list[Name], msgspec.Meta(max_length=256)]


Plugins = Annotated[list[Plugin], msgspec.Meta(max_length=128)]


class LayerTime(msgspec.Struct, frozen=True, array_like=True):
    """How many nanoseconds a layer of this kind (core.runtime.layer_costs) takes on a node for one row.

    `chunk_ns`: for CHUNK_ROWS rows of a prompt. 0 is what is not known.
    """

    kind: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    row_ns: Count
    chunk_ns: Count


class PeerLink(msgspec.Struct, frozen=True, array_like=True):
    """The link from `hop` to the next one: its round trip, and how many bytes a second it takes (0: not known)."""

    hop: Count
    round_trip_us: Count
    bandwidth: Count


LayerTimes = Annotated[list[LayerTime], msgspec.Meta(max_length=64)]


class Proof(msgspec.Struct, frozen=True):
    """What a node has to prove of its copy of the model before it serves: SHA-256 digests (core.runtime.manifest).

    Of `files` they are of whole files, of `rests` of what lies between a file's tensors; `layers` has one per layer
    of the range. Empty ones aren't known, or proven by others.
    """

    manifest: Digest
    files: Annotated[dict[Name, Digest], msgspec.Meta(max_length=4096)]
    rests: Annotated[dict[Name, Digest], msgspec.Meta(max_length=4096)]
    layers: Annotated[list[Digest], msgspec.Meta(max_length=4096)]


class Shard(msgspec.Struct, frozen=True):
    """A layer range of a checkpoint, as a node is to hold it.

    `revision` is the coordinator's own where the model comes from a hub. `parity_layer` is which of its layers the
    node computes on a fixed input, beside the operations of core.parity.
    """

    model_id: Text
    revision: Name | None
    architecture: Name
    quant: Name
    compute_dtype: Name
    layer_start: Layer
    layer_end: Layer
    weight_bytes: Count
    proof: Proof
    parity_layer: Layer | None

    def __post_init__(self) -> None:
        if len(self.proof.layers) != self.layer_end - self.layer_start:
            raise ValueError(f"{len(self.proof.layers)} digests of layers")
        if self.parity_layer is not None and not self.layer_start <= self.parity_layer < self.layer_end:
            raise ValueError(f"layer {self.parity_layer} is none of them")
