"""The formatter of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from core.gateway.answers.formatter import DONE, ChoicesFormatter, event
from core.gateway.answers.generations import Outcome, Step
from core.gateway.answers.logprobs import chat_logprobs
from core.gateway.dialects.dialect import Dialect
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from core.gateway.schemas.chat import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FinishReason,
)
from core.gateway.schemas.common import Usage
from core.gateway.schemas.tools import AnswerCall, AnswerFunction, CallDelta, FunctionDelta
from core.interfaces.engine import FinishReason as EndReason


class ChatFormatter(ChoicesFormatter):
    prefix = "chatcmpl"

    def __init__(self, model: str, body: ChatBody, choices: int, dialect: Dialect) -> None:
        super().__init__(model, body, choices)
        self._logprobs = body.logprobs
        self._readers = [dialect.reader() for _ in range(choices)]

    def whole(self, outcomes: Sequence[Outcome]) -> ChatCompletion:
        choices = [self._choice(index, outcome) for index, outcome in enumerate(outcomes)]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.tally.usage()
        )

    def _choice(self, index: int, outcome: Outcome) -> ChatChoice:
        steps = [Step(index, outcome.generation, delta) for delta in outcome.deltas]
        said = told([piece for step in steps for piece in self._read(step)])
        logprobs = chat_logprobs(outcome.logprobs) if self._logprobs else None
        return ChatChoice(index, whole_message(said), logprobs, self._reason(index, outcome.finish_reason))

    def opening(self) -> Iterator[bytes]:
        for index in range(self.choices):
            yield self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])

    def step(self, step: Step) -> Iterator[bytes]:
        delta, pieces = step.delta, self._read(step)
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        if pieces or logprobs or delta.finish_reason:
            added = told(pieces) if pieces or not logprobs else ChatDelta(content="")
            reason = delta.finish_reason and self._reason(step.index, delta.finish_reason)
            yield self._chunk([ChatChunkChoice(step.index, added, logprobs, reason)])

    def closing(self) -> Iterator[bytes]:
        if self.include_usage:
            yield self._chunk([], self.tally.usage())
        yield DONE

    def _read(self, step: Step) -> list[Piece]:
        reader = self._readers[step.index]
        pieces = reader.read(step.delta)
        self.tally.count(step.index, step.generation, step.delta.tokens, reader.reasoning_tokens)
        return pieces

    def _reason(self, index: int, reason: EndReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._readers[index].called else reason

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return event(
            ChatChunk(
                id=self.id, created=self.created, model=self.model, choices=choices, usage=usage or self.no_usage()
            )
        )


def told(pieces: Iterable[Piece]) -> ChatDelta:
    """What the pieces add to a message: of each call one delta, whatever they have of it."""
    said, thought, calls = "", "", dict[int, CallDelta]()
    for piece in pieces:
        match piece:
            case Content(text):
                said += text
            case Reasoning(text):
                thought += text
            case CallBegins(index, call_id, name):
                calls[index] = CallDelta(index, call_id, "function", FunctionDelta(name))
            case CallArguments(index, text):
                calls.setdefault(index, CallDelta(index)).function.arguments += text
    return ChatDelta(
        content=said or UNSET, reasoning_content=thought or UNSET, tool_calls=list(calls.values()) or UNSET
    )


def whole_message(said: ChatDelta) -> AnswerMessage:
    """The message that `said` all of adds up to."""
    calls = [
        AnswerCall(str(call.id), AnswerFunction(str(call.function.name), call.function.arguments))
        for call in said.tool_calls or ()
    ]
    content = said.content or (None if calls else "")
    return AnswerMessage(content, reasoning_content=said.reasoning_content, tool_calls=calls or UNSET)
