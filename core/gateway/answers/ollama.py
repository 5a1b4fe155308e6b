"""The formatter of Ollama's `/api/chat` and `/api/generate`: lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, Struct

from core.gateway.answers.formatter import Formatter
from core.gateway.answers.generations import Outcome, Step
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from core.gateway.dialects.reader import Reader
from core.gateway.errors import Failure
from core.gateway.schemas.ollama import AnswerMessage, CalledTool, Line, ToolCall


class OllamaFormatter(Formatter):
    """`chats`: what is said comes as a message, and else as a `response`."""

    media = b"application/x-ndjson"

    def __init__(self, model: str, reader: Reader, *, chats: bool) -> None:
        self._model = model
        self._reader = reader
        self._chats = chats
        self._call: CallBegins | None = None
        self._arguments = ""
        self._last: Step | None = None
        self._rest: Sequence[Piece] = ()
        self._began = time.perf_counter_ns()
        self._answered = 0

    def whole(self, outcomes: Sequence[Outcome]) -> Line:
        (outcome,) = outcomes
        self._answered = outcome.answered
        pieces = [piece for delta in outcome.deltas for piece in self._read(Step(0, outcome.generation, delta))]
        return self._ended(pieces)

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def step(self, step: Step) -> Iterator[bytes]:
        pieces = self._read(step)
        if pieces and step.delta.finish_reason is None:
            yield _encoded(self._line(pieces))
        else:
            self._rest = pieces

    def closing(self) -> Iterator[bytes]:
        yield _encoded(self._ended(self._rest))

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield _encoded(failure.ollama_body())

    def _read(self, step: Step) -> list[Piece]:
        self._answered = self._answered or time.perf_counter_ns()
        self._last = step
        return self._reader.read(step.delta)

    def _line(self, pieces: Sequence[Piece]) -> Line:
        said, thought, called = "", "", list[ToolCall]()
        for piece in pieces:
            match piece:
                case Content(text):
                    said += text
                case Reasoning(text):
                    thought += text
                case CallBegins():
                    called += self._complete()
                    self._call = piece
                case CallArguments(_, text):
                    self._arguments += text
        line = Line(model=self._model, created_at=now())
        if self._chats:
            line.message = AnswerMessage("assistant", said, thought or UNSET, called or UNSET)
        else:
            line.response, line.thinking = said, thought or UNSET
        return line

    def _ended(self, pieces: Sequence[Piece]) -> Line:
        assert self._last is not None, "a generation that ends by itself has a last delta"
        line = self._line(pieces)
        if isinstance(line.message, AnswerMessage) and (calls := self._complete()):
            line.message.tool_calls = [*(line.message.tool_calls or ()), *calls]
        generation, ended = self._last.generation, time.perf_counter_ns()
        line.done, line.done_reason = True, self._last.delta.finish_reason or "length"
        line.total_duration, line.load_duration = ended - self._began, 0
        line.prompt_eval_count, line.prompt_eval_duration = generation.prompt_tokens, self._answered - self._began
        line.eval_count, line.eval_duration = self._last.delta.tokens, ended - self._answered
        return line

    def _complete(self) -> list[ToolCall]:
        """The call that was begun: its arguments are told as an object, so once they are whole."""
        call, text = self._call, self._arguments
        self._call, self._arguments = None, ""
        if call is None:
            return []
        try:
            arguments = msgspec.json.decode(text or "{}")
        except (ValueError, RecursionError):
            arguments = {}
        return [ToolCall(CalledTool(call.name, arguments if isinstance(arguments, dict) else {}), call.id)]


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _encoded(data: Struct) -> bytes:
    return msgspec.json.encode(data) + b"\n"
