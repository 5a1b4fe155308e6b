"""The answer of `/v1/responses`, and the events of a streamed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct, field

from core.gateway.schemas.items import ReasoningText, Status
from core.gateway.schemas.responses import ReasoningConfig, ResponseFunction, ResponseToolChoice, TextConfig


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = field(default_factory=list)
    logprobs: list[None] = field(default_factory=list)


class OutputMessage(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)


class OutputReasoning(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thought before it answered."""

    id: str
    status: Status = "in_progress"
    summary: list[None] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class OutputCall(Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputCall
OutputPart: TypeAlias = OutputText | ReasoningText


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """`max_time`, which OpenAI lacks: the request's time was up."""

    reason: Literal["max_output_tokens", "max_time"]


class ResponseError(Struct):
    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response; of what was asked for it repeats what was given."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningConfig
    temperature: float | None
    text: TextConfig
    tool_choice: ResponseToolChoice
    tools: list[ResponseFunction]
    top_p: float | None
    user: str | None
    previous_response_id: str | None
    background: Literal[False] = False
    store: bool
    truncation: Literal["disabled"] = "disabled"


class ResponseDeleted(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(Struct, tag_field="type", kw_only=True):
    """Events of one response are numbered from 0."""

    sequence_number: int


class _Lifecycle(ResponseEvent, kw_only=True):
    response: ResponseObject


class ResponseCreated(_Lifecycle, tag="response.created", kw_only=True):
    pass


class ResponseInProgress(_Lifecycle, tag="response.in_progress", kw_only=True):
    pass


class ResponseCompleted(_Lifecycle, tag="response.completed", kw_only=True):
    pass


class ResponseIncomplete(_Lifecycle, tag="response.incomplete", kw_only=True):
    """`max_output_tokens`, or the context, was reached."""


class ResponseFailed(_Lifecycle, tag="response.failed", kw_only=True):
    pass


class _OfItem(ResponseEvent, kw_only=True):
    output_index: int


class OutputItemAdded(_OfItem, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class OutputItemDone(_OfItem, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class _OfPart(_OfItem, kw_only=True):
    item_id: str
    content_index: int = 0


class ContentPartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    part: OutputPart


class ContentPartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    part: OutputPart


class OutputTextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[None] = field(default_factory=list)


class OutputTextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[None] = field(default_factory=list)


class ReasoningTextDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningTextDone(_OfPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    name: str
    arguments: str


Event: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
