"""The wording of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from core.gateway.answers.generations import Outcome, Step
from core.gateway.answers.logprobs import chat_logprobs
from core.gateway.answers.wording import DONE, ChoicesWording, event
from core.gateway.schemas.chat import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from core.gateway.schemas.common import Usage


class ChatWording(ChoicesWording):
    prefix = "chatcmpl"

    def __init__(self, model: str, body: ChatBody, choices: int) -> None:
        super().__init__(model, body, choices)
        self._logprobs = body.logprobs

    def whole(self, outcomes: Sequence[Outcome]) -> ChatCompletion:
        choices = [self._choice(index, outcome) for index, outcome in enumerate(outcomes)]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.total(outcomes)
        )

    def _choice(self, index: int, outcome: Outcome) -> ChatChoice:
        logprobs = chat_logprobs(outcome.logprobs) if self._logprobs else None
        return ChatChoice(index, AnswerMessage(outcome.text), logprobs, outcome.finish_reason)

    def opening(self) -> Iterator[bytes]:
        for index in range(self.choices):
            yield self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])

    def step(self, step: Step) -> Iterator[bytes]:
        delta = step.delta
        self.tally.count(step.index, step.generation, delta.tokens)
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs or delta.finish_reason:
            added = ChatDelta(content=delta.text if delta.text or logprobs else UNSET)
            yield self._chunk([ChatChunkChoice(step.index, added, logprobs, delta.finish_reason)])

    def closing(self) -> Iterator[bytes]:
        if self.include_usage:
            yield self._chunk([], self.tally.usage())
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return event(
            ChatChunk(
                id=self.id, created=self.created, model=self.model, choices=choices, usage=usage or self.no_usage()
            )
        )
