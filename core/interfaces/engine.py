"""What the gateway is given: an engine that generates and tells its state. Plain data, no torch, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, each at least {"role": ..., "content": ...}: rendered by the model's own chat template."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. A sampling field that is None takes the model's own default, or else the API's.

    `prompt` is text, token ids or a conversation. `temperature` 0 is greedy. `max_tokens` None means up to the
    context limit.
    """

    prompt: str | tuple[int, ...] | Conversation
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds: text (often empty: a token may complete no character), and at the end the reason.

    `tokens` counts the completion's tokens so far, this step's included.
    """

    text: str
    tokens: int
    finish_reason: FinishReason | None = None


class Generation(Protocol):
    """An admitted session; iterating it runs it. Raises RouteError where the route breaks under it."""

    prompt_tokens: int

    def __aiter__(self) -> AsyncIterator[Delta]: ...


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One member. `layers` is [start, end) or None; memory in bytes; `link` says how its upstream reaches it.

    `progress` is (bytes done, bytes in all) while it downloads or loads, as `detail` says.
    """

    node_id: str
    hostname: str
    device: str
    state: str
    layers: tuple[int, int] | None
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    sessions: int
    free_memory: int
    link: str
    detail: str
    progress: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment. `state` is waiting, loading or ready; `detail` says what it waits for.

    `progress` is (bytes done, bytes in all) while the coordinator downloads or loads its own share.
    """

    model: str
    state: str
    detail: str
    progress: tuple[int, int] | None
    required_nodes: int
    ready_nodes: int
    route_epoch: int
    layers: int
    sessions: int
    tokens_per_second: float
    quant: str
    dtype: str
    wire_dtype: str
    nodes: tuple[NodeStatus, ...]
    left_out: Mapping[str, str]


class Engine(Protocol):
    """Lives in trio: all of it is called from the trio thread."""

    @property
    def served_model(self) -> str:
        """The name under which the API offers the model."""

    @property
    def created(self) -> int:
        """When the model was taken into service, in Unix seconds."""

    def status(self) -> ClusterStatus: ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Entering admits the session: raises NotReady or RequestError before anything runs. Leaving frees it."""
