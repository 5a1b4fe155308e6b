"""The wording of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from core.gateway.answers.generations import Outcome, Step
from core.gateway.answers.wording import DONE, OpenAIWording, event
from core.gateway.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from core.gateway.schemas.common import Usage


class ChatWording(OpenAIWording):
    prefix = "chatcmpl"

    def whole(self, outcomes: Sequence[Outcome]) -> ChatCompletion:
        choices = [
            ChatChoice(index, AssistantMessage(outcome.text), None, outcome.finish_reason)
            for index, outcome in enumerate(outcomes)
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.total(outcomes)
        )

    def opening(self) -> Iterator[bytes]:
        for index in range(self.choices):
            yield self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])

    def step(self, step: Step) -> Iterator[bytes]:
        delta = step.delta
        self.tally.count(step.index, step.generation, delta.tokens)
        if delta.text or delta.finish_reason:
            added = ChatDelta(content=delta.text or UNSET)
            yield self._chunk([ChatChunkChoice(step.index, added, None, delta.finish_reason)])

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
