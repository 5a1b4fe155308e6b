"""The request of `/v1/responses`.

Field names and meanings follow the OpenAI API reference (platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, field

from core.gateway.dialects.dialect import Wishes
from core.gateway.dialects.grammars import ANY_OBJECT, Function
from core.gateway.schemas.common import IN_MEMORY, Seconds
from core.gateway.schemas.decoding import Fields, Idle
from core.gateway.schemas.items import GivenItem, InputItem, MessageItem, conversation_of
from core.gateway.schemas.tools import (
    MAX_FUNCTIONS,
    Effort,
    FunctionName,
    JsonObjectFormat,
    Schema,
    TextFormat,
    ToolMode,
    among,
    offered,
    require_call_possible,
    require_distinct,
)
from core.interfaces.engine import Conversation, GenerationRequest

MAX_ITEMS = 4096
MAX_METADATA = 16
SUMMARIES = ("auto", "concise", "detailed")
"""Wishes for a summary of thoughts: these are told whole, so that it has nothing to add to them."""


class ResponseFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """With `strict` the arguments of a call fit `parameters`, a JSON schema."""

    name: FunctionName
    parameters: Schema | None = None
    strict: bool | None = None
    description: str | None = None

    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, bool(self.strict))


class ResponseChosenFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one function that must be called."""

    name: str


class ResponseAllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Only these of the functions on offer; the model isn't told of the others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseChosenFunction], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class ResponseJsonSchema(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The schema is held to whether `strict` or not."""

    name: FunctionName
    schema_: Schema = field(name="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | ResponseJsonSchema = field(default_factory=TextFormat)


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None


ResponseToolChoice: TypeAlias = ToolMode | ResponseChosenFunction | ResponseAllowedTools


class InputBody(Fields, kw_only=True):
    """What a prompt is made of.

    Of `tools` those of type `function` are offered to the model. Others, which are run by OpenAI's servers or have no
    form that models here know, are left out, and a response's `tools` don't list them; a `tool_choice` of one is
    refused. What `previous_response_id` or an item of type `item_reference` names must still be kept here.

    Reasoning items carry their text, which may be sent back: encrypted content has nothing to add to it.
    """

    idle: ClassVar[Idle] = {"conversation": (), "truncation": ("disabled",)}
    idle_inside: ClassVar[Mapping[str, Idle]] = {
        "input": {"async": (False,), "caller": (), "encrypted_content": (), "namespace": ()},
        "reasoning": {"summary": SUMMARIES, "generate_summary": SUMMARIES},
        "text": {"verbosity": ("medium",)},
    }

    model: str
    input: str | Annotated[list[GivenItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextConfig = field(default_factory=TextConfig)
    tools: Annotated[list[ResponseFunction], Meta(max_length=MAX_FUNCTIONS)] = field(default_factory=list)
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The type of an input's message or reference may be left out."""
        match fields.get("input"):
            case [*items]:
                fields = {**fields, "input": [_typed(item) for item in items]}
        return offered(fields, "function")

    @property
    def names(self) -> dict[str, str]:
        """The endpoint's own names of an engine's fields, where they differ: see `naming_fields`."""
        return {"prompt": "input", "template_options": "reasoning.effort"}

    def given(self) -> Sequence[GivenItem]:
        return [MessageItem("user", self.input)] if isinstance(self.input, str) else self.input

    def conversation(self, items: Sequence[InputItem]) -> Conversation:
        """`items` are those of earlier responses and the given ones. Raises RequestError for too much text."""
        return conversation_of(self.instructions, items)

    def wishes(self) -> Wishes:
        functions, required = self._functions()
        return Wishes(
            functions=functions,
            required=required,
            one=not self.parallel_tool_calls or isinstance(self.tool_choice, ResponseChosenFunction),
            schema=self._schema(),
            effort=self.reasoning.effort,
            effort_field="reasoning.effort",
            schema_field="text.format",
        )

    def _functions(self) -> tuple[tuple[Function, ...], bool]:
        functions = tuple(tool.function() for tool in self.tools)
        require_distinct(functions)
        match self.tool_choice:
            case "none":
                return (), False
            case ResponseChosenFunction(name):
                return among(functions, [name], "tool_choice.name"), True
            case ResponseAllowedTools(mode, tools):
                return among(functions, [tool.name for tool in tools], "tool_choice.tools"), mode == "required"
        require_call_possible(functions, self.tool_choice)
        return functions, self.tool_choice == "required"

    def _schema(self) -> Mapping[str, Any] | None:
        match self.text.format:
            case JsonObjectFormat(schema):
                return schema or ANY_OBJECT
            case ResponseJsonSchema(_, schema):
                return schema
        return None


class ResponseBody(InputBody, kw_only=True):
    """`user`, `safety_identifier`, `prompt_cache_key` and `client_metadata` are accepted, and change nothing.

    With `store`, which is on unless the server keeps nothing, the response is kept for a while.
    """

    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use 'max_output_tokens'"),
        "messages": "use 'input'",
        "reasoning_effort": "use 'reasoning' with 'effort'",
        "response_format": "use 'text' with 'format'",
    }
    idle: ClassVar[Idle] = {
        **InputBody.idle,
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": IN_MEMORY,
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
    }

    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] = field(default_factory=dict)
    store: bool | None = None
    stream: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    max_time: Seconds | None = None

    @property
    def names(self) -> dict[str, str]:
        return {**super().names, "max_tokens": "max_output_tokens", "deadline": "max_time"}

    def generation(self, items: Sequence[InputItem], client: str, deadline: float) -> GenerationRequest:
        """What the engine is asked for, of `items` as `conversation` takes them."""
        return GenerationRequest(
            prompt=self.conversation(items),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            client=client,
            deadline=deadline,
        )


def _typed(item: Any) -> Any:
    match item:
        case {"role": _}:
            return {"type": "message", **item}
        case {"id": _, **others} if not any(others.values()):
            return {"id": item["id"], "type": "item_reference"}
    return item


class InputTokens(Struct, kw_only=True):
    """How many tokens the prompt has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
