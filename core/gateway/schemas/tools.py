"""The functions that a chat model may call, which of them it must, and what its answer must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from core.errors import RequestError
from core.gateway.dialects.grammars import ANY_OBJECT, Function

MAX_FUNCTIONS = 128

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema: TypeAlias = dict[str, Any]


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """With `strict` the arguments of a call fit `parameters`, a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, bool(self.strict))


class FunctionTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """`cache_control`, an option of other servers, changes nothing."""

    function: FunctionDefinition
    cache_control: dict[str, Any] | None = None


class FunctionRef(Struct, forbid_unknown_fields=True):
    name: str


class ChosenFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one function that must be called."""

    function: FunctionRef


class AllowedFunctions(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Only these of the functions on offer; the model isn't told of the others."""

    allowed_tools: AllowedFunctions


class AnswerFunction(Struct):
    """`arguments` is a JSON object's text, as the model wrote it."""

    name: str
    arguments: str


class AnswerCall(Struct):
    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class FunctionDelta(Struct):
    """A call's first delta has the name, and each one more of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallDelta(Struct):
    """What a chunk adds to call `index` of a message; `id` and `type` come with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta = field(default_factory=FunctionDelta)


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How long to think; which of these there are, the model's chat template says."""

ToolMode: TypeAlias = Literal["none", "auto", "required"]
ToolChoice: TypeAlias = ToolMode | ChosenFunction | AllowedTools


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object; or one of `schema`, as llama.cpp has it."""

    schema_: Schema | None = field(name="schema", default=None)


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The schema is held to whether `strict` or not."""

    name: FunctionName
    schema_: Schema = field(name="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


def schema_of(answer: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must fit, where there is one."""
    match answer:
        case JsonObjectFormat(schema):
            return schema or ANY_OBJECT
        case JsonSchemaFormat(wanted):
            return wanted.schema_
        case _:
            return None


def chosen(functions: Sequence[Function], choice: ToolChoice) -> tuple[tuple[Function, ...], bool]:
    """The functions that may be called, and whether one must be. Raises RequestError for names of none."""
    match choice:
        case "none":
            return (), False
        case ChosenFunction(FunctionRef(name)):
            return among(functions, [name], "tool_choice.function.name"), True
        case AllowedTools(AllowedFunctions(mode, tools)):
            names = [tool.function.name for tool in tools]
            return among(functions, names, "tool_choice.allowed_tools.tools"), mode == "required"
    require_call_possible(functions, choice)
    return tuple(functions), choice == "required"


def require_call_possible(functions: Sequence[Function], choice: ToolMode) -> None:
    """Raises RequestError where a call is required of no function."""
    if choice == "required" and not functions:
        raise RequestError("'tool_choice' requires a call, but there are no tools", param="tool_choice")


def among(functions: Sequence[Function], names: Iterable[str], param: str) -> tuple[Function, ...]:
    """The functions of these names. Raises RequestError where one isn't on offer."""
    by_name = {function.name: function for function in functions}
    for name in names:
        if name not in by_name:
            raise RequestError(f"'{param}' names {name!r}, which is not among the tools", param=param)
    return tuple(by_name[name] for name in dict.fromkeys(names))


def offered(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields without `tools` of another type than `kind`, which can't be had. What is no tool at all stays, and is
    refused as such."""
    match fields.get("tools"):
        case [*tools]:
            return {**fields, "tools": [tool for tool in tools if _type_of(tool) in (None, kind)]}
    return fields


def _type_of(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else None


def require_distinct(functions: Sequence[Function], param: str = "tools") -> None:
    """Raises RequestError where two functions have one name."""
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"'{param}' has two functions named {name!r}", param=f"{param}[{i}]")
