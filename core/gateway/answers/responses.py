"""The formatter of `/v1/responses`: items of an output, and the events that tell of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from core.gateway.answers.formatter import EventFormatter, named_event
from core.gateway.answers.generations import Step
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from core.gateway.dialects.reader import Reader
from core.gateway.errors import Failure
from core.gateway.schemas.items import ReasoningText, Status
from core.gateway.schemas.response_objects import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
)
from core.gateway.schemas.responses import ResponseBody


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponseFormatter(EventFormatter):
    """`keep`, where it is to be kept, is called with it at its end: before the client may refer to it."""

    def __init__(
        self, model: str, body: ResponseBody, reader: Reader, keep: Callable[[ResponseObject], None] | None = None
    ) -> None:
        self._reader = reader
        self._keep = keep
        self._number = -1
        self._last: Step | None = None
        self._response = ResponseObject(
            id=_id("resp"),
            created_at=int(time.time()),
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning=body.reasoning,
            temperature=body.temperature,
            text=body.text,
            tool_choice=body.tool_choice,
            tools=body.tools,
            top_p=body.top_p,
            user=body.user,
            previous_response_id=body.previous_response_id,
            store=keep is not None,
        )

    @property
    def built(self) -> ResponseObject:
        return self._response

    def opening(self) -> Iterator[bytes]:
        yield named_event(self._numbered(ResponseCreated, response=self._response))
        yield named_event(self._numbered(ResponseInProgress, response=self._response))

    def failed(self, failure: Failure) -> Iterator[bytes]:
        self._response.status = "failed"
        self._response.error = ResponseError(failure.code or "server_error", failure.message)
        yield named_event(self._numbered(ResponseFailed, response=self._response))

    def _step(self, step: Step) -> Iterator[ResponseEvent]:
        self._last = step
        return self._tell(self._reader.push(step.delta.text, step.delta.tokens))

    def _closing(self) -> Iterator[ResponseEvent]:
        is_cut = self._last is not None and self._last.delta.finish_reason == "length"
        yield from self._tell(self._reader.finish(cut=is_cut))
        if not self._response.output:
            yield from self._open_message()
        yield from self._close("incomplete" if is_cut else "completed")
        self._response.usage = self._usage()
        self._response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response.incomplete_details = IncompleteDetails(
                "max_time" if self.out_of_time else "max_output_tokens"
            )
        else:
            self._response.completed_at = int(time.time())
        if self._keep is not None:
            self._keep(self._response)
        yield self._numbered(ResponseIncomplete if is_cut else ResponseCompleted, response=self._response)

    def _tell(self, pieces: Iterable[Piece]) -> Iterator[ResponseEvent]:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    if not isinstance(self._item, OutputReasoning):
                        yield from self._open_reasoning()
                    yield from self._more(text)
                case Content(text):
                    if not isinstance(self._item, OutputMessage):
                        yield from self._open_message()
                    yield from self._more(text)
                case CallBegins(_, call_id, name):
                    yield from self._open(OutputCall(id=_id("fc"), call_id=call_id, name=name))
                case CallArguments(_, text):
                    yield from self._more(text)

    @property
    def _item(self) -> OutputItem | None:
        return self._response.output[-1] if self._response.output else None

    def _open_message(self) -> Iterator[ResponseEvent]:
        item = OutputMessage(id=_id("msg"))
        yield from self._open(item)
        yield self._of_item(ContentPartAdded, part=OutputText(""))
        item.content.append(OutputText(""))

    def _open_reasoning(self) -> Iterator[ResponseEvent]:
        item = OutputReasoning(id=_id("rs"))
        yield from self._open(item)
        yield self._of_item(ContentPartAdded, part=ReasoningText(""))
        item.content.append(ReasoningText(""))

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._response.output.append(item)
        yield self._numbered(OutputItemAdded, output_index=self._index, item=item)

    def _more(self, text: str) -> Iterator[ResponseEvent]:
        match self._item:
            case OutputCall() as call:
                call.arguments += text
                yield self._of_item(ArgumentsDelta, delta=text)
            case OutputMessage(content=[part]):
                part.text += text
                yield self._of_item(OutputTextDelta, delta=text)
            case OutputReasoning(content=[part]):
                part.text += text
                yield self._of_item(ReasoningTextDelta, delta=text)

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        item = self._item
        match item:
            case None:
                return
            case OutputCall():
                yield self._of_item(ArgumentsDone, name=item.name, arguments=item.arguments)
            case OutputMessage(content=[part]):
                yield self._of_item(OutputTextDone, text=part.text)
                yield self._of_item(ContentPartDone, part=part)
            case OutputReasoning(content=[part]):
                yield self._of_item(ReasoningTextDone, text=part.text)
                yield self._of_item(ContentPartDone, part=part)
        item.status = status
        yield self._numbered(OutputItemDone, output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    def _of_item(self, kind: Any, **fields: Any) -> ResponseEvent:
        assert self._item is not None
        return self._numbered(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _numbered(self, kind: Any, **fields: Any) -> ResponseEvent:
        self._number += 1
        event: ResponseEvent = kind(sequence_number=self._number, **fields)
        return event

    def _usage(self) -> ResponseUsage | None:
        if self._last is None:
            return None
        generation, tokens = self._last.generation, self._last.delta.tokens
        return ResponseUsage(
            input_tokens=generation.prompt_tokens,
            input_tokens_details=InputTokensDetails(generation.cached_tokens),
            output_tokens=tokens,
            output_tokens_details=OutputTokensDetails(self._reader.reasoning_tokens),
            total_tokens=generation.prompt_tokens + tokens,
        )
