"""Turns requests into sessions of the route of now; tells what each node is doing."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from core.coordinator.decoding import Decoding
from core.coordinator.members import Member, Members
from core.coordinator.scheduler import Scheduler
from core.coordinator.session import Session
from core.coordinator.speculation import Speculation
from core.coordinator.supervisor import Supervisor
from core.coordinator.telemetry import Telemetry
from core.errors import DeadlineExceeded, RequestError
from core.interfaces.engine import Conversation, GenerationRequest, NodeStatus
from core.runtime.drafting import Drafter
from core.runtime.grammar import Grammars
from core.runtime.model import Model, Precision
from core.runtime.sampling import Sampler, SamplingParams
from core.runtime.tokenizer import Tokenizer


@dataclass(slots=True)
class Generator:
    """Turns requests into sessions. One per loaded model. `max_context` None: the model's own."""

    model: Model
    precision: Precision
    tokenizer: Tokenizer
    grammars: Grammars
    supervisor: Supervisor
    scheduler: Scheduler
    telemetry: Telemetry
    max_context: int | None = None
    speculates: bool = True
    sessions: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Session 0 is the proof's."""

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion: what the model, its host and the route's memory have room for."""
        own = self.model.spec.context_length
        return min(own, self.max_context or own, self.scheduler.admission.budget.longest or own)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Session]:
        self.supervisor.ready_route()
        self.sessions += 1
        session = None
        try:
            with trio.CancelScope(deadline=request.deadline) as scope:
                session = await trio.to_thread.run_sync(self._prepare, request, abandon_on_cancel=True)
                self.supervisor.ready_route()
                try:
                    await self.scheduler.admission.enter(session)
                    yield session
                finally:
                    self.scheduler.leave(session, "deadline" if scope.cancel_called else "cancelled")
            if scope.cancelled_caught:
                raise self._deadline_exceeded(session)
        finally:
            self.sessions -= 1

    def _deadline_exceeded(self, session: Session | None) -> DeadlineExceeded:
        more = "allow it more time with 'max_time', within the server's --max-time"
        if session is None:
            self.telemetry.came_late()
            at, hint = "its prompt was being turned into tokens", f"shorten the prompt, or {more}"
        elif not session.admitted.is_set():
            at, hint = f"it was waiting for room beside {self.scheduler.admission.crowd}", f"try again later, or {more}"
        elif session.decoding.tokens == 0:
            done = min(session.cached, session.prompt_tokens)
            at = f"{done} of its prompt's {session.prompt_tokens} tokens were prefilled"
            hint = f"shorten the prompt, or {more}"
        else:
            at, hint = f"{session.decoding.tokens} tokens were decoded", more
        return DeadlineExceeded("the request's time was up", at, hint)

    def _prepare(self, request: GenerationRequest) -> Session:
        prompt = self._prompt_ids(request)
        room = self._room(len(prompt), request)
        self.require_known(request.stop_token_ids, "stop_token_ids")
        self.require_known(tuple(request.logit_bias), "logit_bias")
        params = sampling_params(request, self.model.checkpoint.generation_config)
        constraint = self.grammars.matcher(request.grammar) if request.grammar else None
        eos = frozenset[int]() if request.ignore_eos else self.tokenizer.eos_ids
        speculates = self.speculates and self.model.spec.rolls_back and constraint is None
        decoding = Decoding(
            sampler=Sampler(params, prompt=prompt, constraint=constraint),
            text=self.tokenizer.text_stream(request.stop, special_tokens=request.special_tokens),
            stop_ids=eos | frozenset(request.stop_token_ids),
            max_tokens=room,
            bounded=request.max_tokens is not None,
            speculation=Speculation(Drafter() if speculates else None, prompt),
            logprobs=request.logprobs,
            prompt_logprobs_asked=request.prompt_logprobs,
        )
        return Session(next(self.ids), prompt, decoding, request.client)

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
                f"the model has no token {outside}", f"its tokens go from 0 to {vocabulary - 1}", param=param
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
        context = self.context_length
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


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the client asks for, or else the model's makers advise, or else nothing that shapes the draw."""
    plain = SamplingParams()

    def pick(name: str) -> Any:
        own = getattr(plain, name)
        return next((v for v in (getattr(request, name), defaults.get(name)) if v is not None), own)

    return SamplingParams(
        temperature=pick("temperature"),
        top_p=pick("top_p"),
        top_k=int(pick("top_k")),
        min_p=pick("min_p"),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty"),
        logit_bias=request.logit_bias,
        seed=request.seed,
    )
