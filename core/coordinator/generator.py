"""Admits generations to the route of now as sessions, and counts their tokens; tells what each node is doing."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from core.coordinator.head import Decoding, Head
from core.coordinator.members import Member, Members
from core.coordinator.route import Route
from core.coordinator.session import Session
from core.coordinator.supervisor import Supervisor
from core.errors import Overloaded, RequestError
from core.interfaces.engine import Conversation, GenerationRequest, NodeStatus
from core.runtime.compute import ComputeThread
from core.runtime.model import Model, Precision
from core.runtime.sampling import Sampler, SamplingParams
from core.runtime.tokenizer import Tokenizer

MAX_SESSIONS = 64
RATE_SECONDS = 10.0
_FREE_SECONDS = 1.0


class TokenRate:
    """Tokens per second over the last ten seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=16_384)

    def count(self) -> None:
        self._times.append(time.monotonic())

    def per_second(self) -> float:
        now = time.monotonic()
        while self._times and now - self._times[0] > RATE_SECONDS:
            self._times.popleft()
        return len(self._times) / RATE_SECONDS


@dataclass(slots=True)
class Generator:
    """Turns requests into sessions. One per loaded model."""

    model: Model
    precision: Precision
    tokenizer: Tokenizer
    head: Head
    compute: ComputeThread
    supervisor: Supervisor
    rate: TokenRate
    sessions: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Session 0 is the proof's."""

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Session]:
        route = self.supervisor.ready_route()
        if self.sessions + route.abandoned >= MAX_SESSIONS:
            raise Overloaded(
                f"{MAX_SESSIONS} sessions are running or being cleared away",
                "no more are taken at once",
                "try again shortly",
            )
        self.sessions += 1
        try:
            prompt, decoding = await trio.to_thread.run_sync(self._prepare, request)
            session = self._session(prompt, decoding, route)
            try:
                yield session
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _FREE_SECONDS):
                    await session.free()
        finally:
            self.sessions -= 1

    def _session(self, prompt: list[int], decoding: Decoding, route: Route) -> Session:
        return Session(next(self.ids), prompt, decoding, route, self.head, self.compute, self.rate.count)

    def _prepare(self, request: GenerationRequest) -> tuple[list[int], Decoding]:
        prompt = self._prompt_ids(request)
        room = self._room(len(prompt), request)
        defaults = self.model.checkpoint.generation_config
        temperature = _first(request.temperature, defaults.get("temperature"), 1.0)
        params = SamplingParams(
            temperature=temperature,
            top_p=_first(request.top_p, defaults.get("top_p"), 1.0),
            top_k=int(_first(request.top_k, defaults.get("top_k"), 0)),
            seed=request.seed,
        )
        text = self.tokenizer.text_stream(request.stop)
        return prompt, Decoding(Sampler(params), text, self.tokenizer.eos_ids, room)

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        ids, param = self.encode(request.prompt), _param(request)
        if not ids:
            raise RequestError("the prompt is empty", "it has no token", "send at least one", param=param)
        self.require_known(ids, param)
        return ids

    def require_known(self, ids: Sequence[int], param: str) -> None:
        """Raises RequestError for a token that the model doesn't have."""
        vocabulary = self.model.spec.vocab_size
        outside = next((token for token in ids if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise RequestError(
                f"the prompt has a token {outside}", f"the model's go from 0 to {vocabulary - 1}", param=param
            )

    def encode(self, prompt: str | Sequence[int] | Conversation) -> list[int]:
        match prompt:
            case Conversation() as conversation:
                return self.tokenizer.encode_chat(conversation)
            case str(text):
                return self.tokenizer.encode(text)
            case ids:
                return list(ids)

    def _room(self, prompt: int, request: GenerationRequest) -> int:
        """How many tokens may be decoded. Raises RequestError where the context has no room for what is asked."""
        context = self.model.spec.context_length
        wanted = 1 if request.max_tokens is None else request.max_tokens
        if prompt + wanted > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens",
                f"the request is {prompt + wanted} tokens: {prompt} in the prompt, {wanted} for the completion",
                "shorten either",
                param=_param(request),
                code="context_length_exceeded",
            )
        return context - prompt if request.max_tokens is None else wanted


def _param(request: GenerationRequest) -> str:
    """The field of the API's request that the prompt came from."""
    return "messages" if isinstance(request.prompt, Conversation) else "prompt"


def node_statuses(members: Members) -> tuple[NodeStatus, ...]:
    return tuple(_status_of(member) for member in members.all())


def _status_of(member: Member) -> NodeStatus:
    reported = member.reported
    return NodeStatus(
        node_id=member.node_id,
        hostname=member.hello.hostname,
        device=member.hello.selected_device,
        state=member.state,
        layers=(member.layers.start, member.layers.stop) if member.layers is not None else None,
        weight_bytes=member.weight_bytes,
        kv_bytes=reported.kv_bytes,
        kv_tokens=reported.kv_tokens,
        sessions=reported.sessions,
        free_memory=reported.free_memory,
        link=member.upstream_link,
        detail=member.detail,
        progress=member.progress,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
