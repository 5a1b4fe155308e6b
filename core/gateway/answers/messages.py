"""The formatter of Anthropic's `/v1/messages`: blocks of a message, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator

import msgspec

from core.gateway.answers.formatter import EventFormatter, named_event
from core.gateway.answers.generations import Step
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from core.gateway.dialects.reader import Reader
from core.gateway.errors import Failure
from core.gateway.schemas.anthropic import MessagesBody
from core.gateway.schemas.anthropic_objects import (
    Block,
    BlockDelta,
    BlockMore,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageEnd,
    MessageEvent,
    MessageMore,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolUse,
)


class MessageFormatter(EventFormatter):
    """The first event tells what the prompt cost, and so comes with the first step."""

    def __init__(self, model: str, body: MessagesBody, reader: Reader) -> None:
        self._max_tokens = body.max_tokens
        self._reader = reader
        self._message = MessageObject(id=f"msg_{secrets.token_hex(12)}", model=model, usage=MessageUsage(0, 0))
        self._arguments = ""
        self._last: Step | None = None

    @property
    def built(self) -> MessageObject:
        return self._message

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield named_event(failure.anthropic_body())

    def _step(self, step: Step) -> Iterator[MessageEvent]:
        is_first, self._last = self._last is None, step
        if is_first:
            self._message.usage = self._usage(step)
            yield MessageStart(self._message)
        yield from self._tell(self._reader.push(step.delta.text, step.delta.tokens))

    def _closing(self) -> Iterator[MessageEvent]:
        assert self._last is not None, "a generation that ends by itself has a last delta"
        yield from self._tell(self._reader.finish(cut=self._last.delta.finish_reason == "length"))
        yield from self._close()
        message = self._message
        message.usage = self._usage(self._last)
        reason = message.stop_reason = self._reason(self._last)
        message.stop_sequence = self._last.delta.stop if reason == "stop_sequence" else None
        yield MessageMore(MessageEnd(reason, message.stop_sequence), message.usage)
        yield MessageStop()

    def _tell(self, pieces: Iterable[Piece]) -> Iterator[MessageEvent]:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    if not isinstance(self._block, Thinking):
                        yield from self._open(Thinking())
                    yield self._more(ThinkingDelta(text))
                case Content(text):
                    if not isinstance(self._block, Text):
                        yield from self._open(Text())
                    yield self._more(TextDelta(text))
                case CallBegins(_, call_id, name):
                    yield from self._open(ToolUse(call_id, name))
                case CallArguments(_, text):
                    yield self._more(InputJsonDelta(text))

    @property
    def _block(self) -> Block | None:
        return self._message.content[-1] if self._message.content else None

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1

    def _open(self, block: Block) -> Iterator[MessageEvent]:
        yield from self._close()
        self._message.content.append(block)
        yield BlockStart(self._index, block)

    def _more(self, delta: BlockDelta) -> MessageEvent:
        match self._block, delta:
            case Text() as block, TextDelta(text):
                block.text += text
            case Thinking() as block, ThinkingDelta(text):
                block.thinking += text
            case ToolUse(), InputJsonDelta(text):
                self._arguments += text
        return BlockMore(self._index, delta)

    def _close(self) -> Iterator[MessageEvent]:
        match self._block:
            case None:
                return
            case ToolUse() as block:
                block.input, self._arguments = _object(self._arguments), ""
        yield BlockStop(self._index)

    def _reason(self, last: Step) -> StopReason:
        delta = last.delta
        if delta.finish_reason == "length":
            is_full = delta.tokens < self._max_tokens and not self.out_of_time
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self._reader.called:
            return "tool_use"
        return "stop_sequence" if delta.stop else "end_turn"

    @staticmethod
    def _usage(step: Step) -> MessageUsage:
        cached = step.generation.cached_tokens
        return MessageUsage(step.generation.prompt_tokens - cached, step.delta.tokens, cached)


def _object(text: str) -> dict[str, object]:
    """A call's arguments; those of one that was cut are none."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
