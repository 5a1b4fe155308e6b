"""What the gateway is given: an engine that generates and tells its state. Plain data, no torch, no HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from core.interfaces.membership import Membership
from core.interfaces.planner import StagePlan
from core.interfaces.telemetry import ClusterEvent, History, HopStatus, KVStatus, Metric, PaceStatus, SessionStatus

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, each at least {"role": ..., "content": ...}: rendered by the model's own chat template.

    `tools` are the functions on offer, as the OpenAI API writes them; `template_options` go to the template as they
    are (`enable_thinking`, for instance). `opens_answer` ends the prompt with what begins the assistant's answer;
    `continues_last` ends it within the last message, which the answer goes on with.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    continues_last: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must be: any JSON object, JSON that fits `text` (a schema), or what the Lark grammar `text` says.

    With `trigger` it holds only from the first appearance of that string on. `schemas` are those that a Lark grammar
    has in it, each with its name: a RequestError of one that is wrong has that name as its `param`.
    """

    kind: Literal["json_object", "json_schema", "lark"]
    text: str = ""
    trigger: str = ""
    schemas: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. A sampling field that is None takes the model's own default, or else OpenAI's.

    `prompt` is text, token ids or a conversation. `temperature` 0 is greedy. `max_tokens` None means up to the
    context limit; 0 evaluates the prompt alone. More than there is room for is refused, or with `fits_context` cut to
    what fits. `logit_bias` is added to the logits of those token ids. `logprobs` is
    how many alternatives each token's log probabilities list (0: the chosen token's alone, None: none are told);
    `prompt_logprobs` the same for the prompt's tokens. `special_tokens` leaves special tokens in the text.
    `client` is whom the engine is to be fair to. `deadline`, by trio's clock, ends the generation in any phase.
    """

    prompt: str | tuple[int, ...] | Conversation
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    special_tokens: bool = False
    fits_context: bool = False
    client: str = ""
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability, before temperature and whatever else shapes the draw, and the likeliest ones.

    `text` is the token by itself; one that is only part of a character has U+FFFD in it, and `raw` its bytes.
    `logprob` is None for a prompt's first token, which nothing predicts. `top` is ordered, likeliest first.
    """

    token: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds: text (often empty: a token may complete no character), and at the end the reason.

    `tokens` counts the completion's tokens so far, this step's included. A step may add several tokens; `logprobs`
    has one entry for each, where they were asked for. `stop` is the stop string that ended the text, if one did.
    """

    text: str
    tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""


class Generation(Protocol):
    """An admitted session; iterating it runs it. Raises RouteError where the route breaks under it, and StageError
    where a stage fails it.

    `cached_tokens` of the prompt were found in the nodes' caches: known from the first delta on, like
    `prompt_logprobs`, which has one entry for each of the prompt's tokens where they were asked for. `waits_for` says
    why it does not go on for now, and is empty while it does; any thread may ask.
    """

    prompt_tokens: int
    cached_tokens: int

    @property
    def waits_for(self) -> str: ...

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The Jinja `source` of a chat template, and the `variables` that its code looks at."""

    source: str
    variables: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the served model is. `chat_template` is for conversations, `tool_template` for those that offer tools: the
    same one in most models, and None if there is none.

    `context_length` is what prompt and completion may have together now, in tokens: as much as the model, the host's
    options and the nodes' memory allow.
    """

    name: str
    created: int
    context_length: int
    vocab_size: int
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One member. `layers` is [start, end) or None; memory in bytes; `link` says how its upstream reaches it.

    `progress` is (bytes done, bytes in all) while it downloads or loads, as `detail` says. `row_seconds` and
    `chunk_seconds` are what a planner is told of it, as in core.interfaces.planner.Candidate, of all layers; so are
    `memory`, the bytes that it offers for layers and their caches, and `estimated`. `tokens` have passed its layers.
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
    row_seconds: tuple[float, ...] = ()
    chunk_seconds: tuple[float, ...] = ()
    memory: int = 0
    tokens: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class PlanningStatus:
    """What planners are asked for, as in core.interfaces.planner.PlanRequest, and which one is."""

    planner: str
    plan_for: str
    layer_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    row_bytes: int
    min_nodes: int
    max_nodes: int | None
    pins: Mapping[str, tuple[int, int]]
    excluded: tuple[str, ...]
    prompt_rows: float = 0.0
    head_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WireStatus:
    """What was measured between two nodes, or between a node and the coordinator, whose end is "".

    `seconds` for a small message one way, `bandwidth` in bytes per second (0: not known).
    """

    ends: tuple[str, str]
    seconds: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment. `state` is waiting, loading or ready; `detail` says what it waits for.

    `quality` says in a short phrase what `quant` and `dtype` cost in quality; all of these may be "auto", and `quality`
    empty, before the model is open.

    `wire_ms` is what a decode step spends between the hops; `generations` are those that run or wait.

    `notes` are what the planner says of the plan. `planning` is None before the model is open.

    `predicted_token_seconds` is what a token of one stream is predicted to take on the route that serves, and
    `measured_token_seconds` what it took of late, while it was the only one; 0 if that is not known.

    `progress` is (bytes done, bytes in all) while the coordinator downloads or loads its own share.

    `events` are what happened last, the newest at the end. `register_changes` grows whenever a machine is invited, asks
    to join, is let in or removed.
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
    quality: str
    nodes: tuple[NodeStatus, ...]
    left_out: Mapping[str, str]
    kv: KVStatus = field(default_factory=KVStatus)
    hops: tuple[HopStatus, ...] = ()
    wire_ms: float = 0.0
    generations: tuple[SessionStatus, ...] = ()
    wires: tuple[WireStatus, ...] = ()
    predicted_token_seconds: float = 0.0
    measured_token_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    planning: PlanningStatus | None = None
    events: tuple[ClusterEvent, ...] = ()
    register_changes: int = 0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The plan for other machines than those that are there; `message` says what it would bring, or why there is none.

    `token_seconds` are what a token of one stream is predicted to take now and then; 0 if that is not known.
    """

    message: str
    stages: tuple[StagePlan, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    token_seconds: tuple[float, float] = (0.0, 0.0)


class Engine(Protocol):
    """Lives in trio: all of it is called from the trio thread.

    `client` is as in GenerationRequest: what one asks to be turned into tokens holds up no other.

    The `param` of a RequestError is the field of GenerationRequest that is wrong, or of a Conversation its `tools` or
    `template_options`, or the argument of the method that was called.
    """

    @property
    def served_model(self) -> str:
        """The name under which the model is offered."""

    @property
    def created(self) -> int:
        """When the model was taken into service, in Unix seconds."""

    @property
    def membership(self) -> Membership: ...

    def status(self) -> ClusterStatus: ...

    def history(self) -> History: ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Entering admits the session: raises NotReady, Overloaded or RequestError before anything runs, or RouteError
        where the route breaks while it waits. Leaving frees it.

        At the request's deadline what runs inside is cancelled, and DeadlineExceeded raised.
        """

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[SessionStatus | PaceStatus]]:
        """What becomes of generations and machines, as it happens. Raises NotReady before the model is open."""

    def metrics(self) -> tuple[Metric, ...]: ...

    def card(self) -> ModelCard:
        """Raises NotReady before the model is open."""

    async def rebalance(self) -> str:
        """Has the next plan made of all nodes that are there, and says in a sentence what becomes of it.

        Raises NotReady before the model is open.
        """

    async def what_if(self, without: Sequence[str], newcomers: Sequence[int]) -> WhatIf:
        """What would be planned without those nodes, and with others that have so many bytes of memory.

        Raises NotReady before the model is open, RequestError for a node that is not there.
        """

    async def tokenize(self, prompt: str | Conversation, client: str = "") -> tuple[int, ...]:
        """The ids of a prompt, as a generation would have them. Raises NotReady or RequestError."""

    async def prompt_end(self, conversation: Conversation, client: str = "") -> str:
        """The last characters of the prompt that a conversation becomes. Raises NotReady or RequestError."""

    async def detokenize(self, tokens: tuple[int, ...], client: str = "") -> str:
        """The text of token ids, special tokens included. Raises NotReady or RequestError."""
