"""Turns requests into sessions."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from core.coordinator.admission import context_exceeded
from core.coordinator.decoding import Decoding
from core.coordinator.preparation import Preparation
from core.coordinator.router import Router
from core.coordinator.session import Session
from core.coordinator.speculation import Speculation
from core.coordinator.telemetry import Telemetry
from core.errors import DeadlineExceeded, RequestError
from core.interfaces.engine import Conversation, GenerationRequest
from core.runtime.drafting import Drafter
from core.runtime.grammar import Grammars
from core.runtime.layer_cache import longest_within
from core.runtime.model import Model, Precision
from core.runtime.sampling import Sampler
from core.runtime.sampling_params import SamplingParams
from core.runtime.tokenizer import Tokenizer

LETTERS_PER_TOKEN = 16
"""More than a token has on average in any language: a prompt with more for each of the context is tried in part."""
_SLACK = 16
"""Tokens by which a text's beginning may differ from the beginning of its tokens."""


@dataclass(slots=True)
class Generator:
    """Turns requests into sessions. One per loaded model. `max_context` None: the model's own."""

    model: Model
    precision: Precision
    tokenizer: Tokenizer
    grammars: Grammars
    router: Router
    telemetry: Telemetry
    max_context: int | None = None
    speculates: bool = True
    sessions: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Session 0 is the proof's."""
    preparation: Preparation = field(default_factory=Preparation)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion: what the model, its host and the route's memory have room for."""
        own = self.model.spec.context_length
        serving = self.router.serving
        # While layers come and go it is not known yet: admission decides then.
        settled = serving is not None and serving.route.is_settled
        room = longest_within(serving.route.kv_capacity) if serving is not None and settled else own
        return min(own, self.max_context or own, room)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Session]:
        self.router.refuse_unless_expected()
        self.sessions += 1
        session = None
        try:
            with trio.CancelScope(deadline=request.deadline) as scope:
                session = await self.preparation.run(request.client, self._prepare, request)
                async with self.router.running(session, lambda: "deadline" if scope.cancel_called else "cancelled"):
                    yield session
            if scope.cancelled_caught:
                raise self._deadline_exceeded(session)
        finally:
            self.sessions -= 1

    def _deadline_exceeded(self, session: Session | None) -> DeadlineExceeded:
        if session is None:
            self.telemetry.came_late()
            at, hint = "its prompt was being turned into tokens", "shorten the prompt"
        elif not session.has_run:
            at, hint = f"it was waiting for room beside {self.router.crowd}", "try again later"
        elif session.decoded == 0:
            at = f"{session.prefilled} of its prompt's {session.prompt_tokens} tokens were prefilled"
            hint = "shorten the prompt"
        else:
            at, hint = f"{session.decoded} tokens were decoded", ""
        return DeadlineExceeded("the request's time was up", at, hint)

    def _prepare(self, request: GenerationRequest) -> Session:
        prompt = self._prompt_ids(request)
        room = self._room(len(prompt), request)
        self.require_known(request.stop_token_ids, "stop_token_ids")
        self.require_known(tuple(request.logit_bias), "logit_bias")
        params = sampling_params(request, self.model.sampling_defaults)
        constraint = self.grammars.matcher(request.grammar) if request.grammar else None
        eos = frozenset[int]() if request.ignore_eos else self.tokenizer.eos_ids
        speculates = self.speculates and self.model.spec.can_truncate and constraint is None
        decoding = Decoding(
            sampler=Sampler(params, prompt=prompt, constraint=constraint),
            text=self.tokenizer.text_stream(request.stop, special_tokens=request.special_tokens),
            stop_ids=eos | frozenset(request.stop_token_ids),
            max_tokens=room,
            bounded=request.max_tokens is not None and not request.fits_context,
            speculation=Speculation(Drafter() if speculates else None, prompt),
            logprobs=request.logprobs,
            prompt_logprobs_asked=request.prompt_logprobs,
        )
        return Session(next(self.ids), prompt, decoding, request.client)

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        self._refuse_if_far_too_long(request.prompt)
        ids = self.encode(request.prompt)
        if not ids:
            raise RequestError("the prompt is empty", "it has no token", "send at least one", param="prompt")
        self.require_known(ids, "prompt")
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

    def _refuse_if_far_too_long(self, prompt: str | Sequence[int] | Conversation) -> None:
        """Raises RequestError, having turned no more than its beginning into tokens."""
        context, begun = self.context_length, _beginning(prompt, LETTERS_PER_TOKEN * self.context_length)
        if begun and (tokens := len(self.tokenizer.encode(begun, special_tokens=False))) > context + _SLACK:
            raise RequestError(
                f"This model's maximum context length is {context} tokens",
                f"the first {len(begun)} letters of the prompt alone are {tokens} tokens",
                "shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )

    def _room(self, prompt: int, request: GenerationRequest) -> int:
        """How many tokens may be decoded. Raises RequestError if the context has no room for what is asked."""
        context = self.context_length
        wanted = 1 if request.max_tokens is None else request.max_tokens
        if prompt + (min(wanted, 1) if request.fits_context else wanted) > context:
            raise context_exceeded(context, prompt, wanted)
        return context - prompt if request.max_tokens is None else min(wanted, context - prompt)


def _beginning(prompt: str | Sequence[int] | Conversation, letters: int) -> str:
    """So many letters of a prompt that has more; "" of any other."""
    texts: list[str] = []
    if isinstance(prompt, Conversation):
        told = [(message.get("content"), message.get("tool_calls")) for message in prompt.messages]
        texts = list(_strings([told, prompt.tools]))
    elif isinstance(prompt, str):
        texts = [prompt]
    if sum(map(len, texts)) <= letters:
        return ""
    begun = ""
    for text in texts:
        begun += text[: letters - len(begun)]
    return begun


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            yield from _strings(list(value.values()))
        case Sequence():
            for each in value:
                yield from _strings(each)


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
