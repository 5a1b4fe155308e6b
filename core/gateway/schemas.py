"""Request bodies of the OpenAI API: what is supported, what may be left idle, and errors that name the field.

Field names and meanings follow the OpenAI API reference (platform.openai.com/docs/api-reference); `top_k` is an
extension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from core.errors import RequestError
from core.interfaces.engine import Conversation, GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 16

Idle: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Fields of the API that are not supported, with the values of each that ask for nothing."""

_INT32 = 2**31 - 1
_StopText = Annotated[str, Meta(min_length=1)]
_TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
_Count = Annotated[int, Meta(ge=1, le=_INT32)]

_IDLE_ANYWHERE: Idle = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "user": (),
}
_IDLE_IN_MESSAGES: Idle = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
_IDLE_IN_STREAM_OPTIONS: Idle = {"include_obfuscation": (False,)}


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the two generating endpoints share."""

    idle: ClassVar[Idle]

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    def generation(self) -> GenerationRequest:
        """What the engine is asked for. Raises RequestError where fields contradict each other."""
        if self.stream_options and not self.stream:
            raise RequestError("'stream_options' goes only with 'stream': true", param="stream_options")
        return GenerationRequest(
            prompt=self._prompt(),
            max_tokens=self._limit(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
        )

    def _prompt(self) -> str | tuple[int, ...] | Conversation:
        raise NotImplementedError

    def _limit(self) -> int | None:
        raise NotImplementedError


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    idle = {**_IDLE_ANYWHERE, "best_of": (1,), "echo": (False,), "logprobs": (False,), "suffix": ("",)}

    prompt: str | list[str | _TokenId | list[_TokenId]]

    def _prompt(self) -> str | tuple[int, ...]:
        match self.prompt:
            case str() as text:
                return text
            case [str() as text]:
                return text
            case [[*ids]] | [*ids] if ids and all(isinstance(item, int) for item in ids):
                return tuple(item for item in ids if isinstance(item, int))
        raise RequestError(
            "'prompt' must be one prompt: a string, or a list of token ids that is not empty",
            hint="send several prompts as several requests",
            param="prompt",
        )

    def _limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    idle = {
        **_IDLE_ANYWHERE,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None

    def _prompt(self) -> Conversation:
        return Conversation(tuple({"role": each.role, "content": each.text()} for each in self.messages))

    def _limit(self) -> int | None:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("'max_tokens' and 'max_completion_tokens' differ", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens


B = TypeVar("B", bound=Body)


def decode(body: bytes, kind: type[B]) -> B:
    """A request's JSON as `kind`. Raises RequestError naming the field that is wrong, unknown or not supported."""
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("the body is not valid JSON", str(error), code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return msgspec.convert(_without_idle(fields, kind.idle), kind)
    except msgspec.ValidationError as error:
        raise _naming_the_field(error) from error


def _without_idle(fields: dict[str, Any], idle: Idle) -> dict[str, Any]:
    kept: dict[str, Any] = _drop(fields, idle, "")
    match kept.get("messages"):
        case [*messages]:
            kept["messages"] = [_drop(m, _IDLE_IN_MESSAGES, f"messages[{i}].") for i, m in enumerate(messages)]
    if "stream_options" in kept:
        kept["stream_options"] = _drop(kept["stream_options"], _IDLE_IN_STREAM_OPTIONS, "stream_options.")
    return kept


def _drop(fields: Any, idle: Idle, where: str) -> Any:
    """`fields` without nulls and without what is idle; anything but an object is left to be refused as such."""
    if not isinstance(fields, dict):
        return fields
    kept = {name: value for name, value in fields.items() if value is not None}
    for name in idle.keys() & kept.keys():
        if not any(_same(kept[name], nothing) for nothing in idle[name]):
            accepted = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in idle[name])])
            raise RequestError(
                f"'{where}{name}' is not supported",
                hint=f"leave it out, or send {accepted}",
                param=where + name,
                code="unsupported_parameter",
            )
        del kept[name]
    return kept


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def _naming_the_field(error: msgspec.ValidationError) -> RequestError:
    """msgspec says where in the text of its errors alone: `... - at `$.messages[0].role``."""
    place = _PLACE.fullmatch(str(error))
    what, path = (place["what"], place["path"] or "") if place else (str(error), "")
    if field := _FIELD.fullmatch(what):
        param = f"{path}.{field['name']}".lstrip(".")
        if field["how"] == "missing required":
            return RequestError(f"'{param}' is missing", param=param, code="missing_required_parameter")
        return RequestError(f"'{param}' is not a known field", param=param, code="unknown_parameter")
    return RequestError(f"'{path}' is not valid", what, param=path, code="invalid_value")
