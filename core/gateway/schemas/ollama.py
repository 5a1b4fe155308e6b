"""Ollama's API: the requests, the answers, and the lines of a streamed one.

Field names and meanings follow its API reference (github.com/ollama/ollama, docs/api.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from core.gateway.dialects.dialect import Wishes
from core.gateway.dialects.grammars import ANY_OBJECT
from core.gateway.schemas.common import INT32, MAX_STOPS, Seed, StopText
from core.gateway.schemas.decoding import Fields, Idle
from core.gateway.schemas.foreign import IDLE, INSTEAD
from core.gateway.schemas.messages import MAX_MESSAGES, told, told_call
from core.gateway.schemas.tools import MAX_FUNCTIONS, FunctionTool, Schema, require_distinct
from core.interfaces.engine import Conversation, GenerationRequest

HOSTS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa")
"""Options that the host decides here: they change nothing."""
_OPTIONS_IDLE: Idle = {
    **{name: IDLE[name] for name in ("mirostat", "tfs_z", "typical_p")},
    "repeat_last_n": (-1, 64),
    "penalize_newline": (True, False),
    "mirostat_eta": (),
    "mirostat_tau": (),
}


class Options(Struct, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=INT32, description="-1 and -2: as many as there is room for.")] = -1
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: StopText | Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()


class OllamaBody(Fields, kw_only=True):
    """`keep_alive` and the options that the host decides here (`num_ctx`, `num_gpu`, ...) change nothing.

    `think` is told to chat templates that know it.
    """

    idle: ClassVar[Idle] = {"logprobs": (False,), "top_logprobs": (0,), "truncate": (True,), "shift": (True,)}
    idle_inside: ClassVar[Mapping[str, Idle]] = {"options": _OPTIONS_IDLE}
    instead: ClassVar[Mapping[str, str]] = {**INSTEAD} | {f"options.{name}": said for name, said in INSTEAD.items()}

    model: str
    stream: bool = True
    format: Literal["", "json"] | Schema = ""
    options: Options = field(default_factory=Options)
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        match fields.get("options"):
            case dict(options):
                kept = {name: value for name, value in options.items() if name not in HOSTS and value is not None}
                return {**fields, "options": kept}
        return fields

    @property
    def names(self) -> dict[str, str]:
        """The endpoint's own names of an engine's fields, where they differ: see `naming_fields`."""
        return {"max_tokens": "options.num_predict", "template_options": "think", "stop": "options.stop"}

    def prompt(self) -> Conversation | str:
        """What is continued. Raises RequestError for too much text."""
        raise NotImplementedError

    @property
    def only_loads(self) -> bool:
        """Whether nothing is asked but that the model be there."""
        raise NotImplementedError

    def wishes(self) -> Wishes:
        hints: dict[str, Any] = {}
        if self.think is not None:
            hints["enable_thinking"] = self.think is not False
        if isinstance(self.think, str):
            hints["reasoning_effort"] = self.think
        schema = ANY_OBJECT if self.format == "json" else self.format or None
        assert not isinstance(schema, str)
        return Wishes(schema=schema, hints=hints, schema_field="format")

    def generation(self, client: str, deadline: float) -> GenerationRequest:
        options = self.options
        return GenerationRequest(
            prompt=self.prompt(),
            max_tokens=None if options.num_predict < 0 else options.num_predict,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=None if options.top_k is None else max(options.top_k, 0),
            min_p=options.min_p,
            seed=options.seed,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repeat_penalty,
            stop=(options.stop,) if isinstance(options.stop, str) else options.stop,
            fits_context=True,
            client=client,
            deadline=deadline,
        )


class CalledTool(Struct):
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ToolCall(Struct):
    """Ollama's calls have no ids: a result names its function, or follows its call."""

    function: CalledTool
    id: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """A result names its function (`tool_name`), or belongs to the first call that has none so far. Only text is read
    here."""

    idle_inside: ClassVar[Mapping[str, Idle]] = {**OllamaBody.idle_inside, "messages": {"images": ([],)}}

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = field(default_factory=list)
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_FUNCTIONS)] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        return {**super().names, "prompt": "messages"}

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def prompt(self) -> Conversation:
        messages: list[dict[str, Any]] = []
        waiting: list[str] = []
        for turn, message in enumerate(self.messages):
            messages.append(_told(message, turn, waiting))
        return told(messages, "messages")

    def wishes(self) -> Wishes:
        functions = tuple(tool.function.function() for tool in self.tools)
        require_distinct(functions)
        return replace(super().wishes(), functions=functions)


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """With `raw` the prompt is continued as it is, without the chat template."""

    idle: ClassVar[Idle] = {**OllamaBody.idle, "suffix": ("",), "template": ("",), "context": ([],), "images": ([],)}

    prompt_: str = field(name="prompt", default="")
    system: str = ""
    raw: bool = False

    @property
    def only_loads(self) -> bool:
        return not self.prompt_

    def prompt(self) -> Conversation | str:
        if self.raw:
            return self.prompt_
        system = [{"role": "system", "content": self.system}] if self.system else []
        return told([*system, {"role": "user", "content": self.prompt_}], "prompt")


def _told(message: Message, turn: int, waiting: list[str]) -> dict[str, Any]:
    """As templates expect it. `waiting` are the ids of calls without a result so far, the oldest first."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        rendered["reasoning_content"] = message.thinking
    if message.tool_calls:
        ids = [call.id or f"call_{turn}_{index}" for index, call in enumerate(message.tool_calls)]
        waiting[:] = ids
        rendered["tool_calls"] = [
            told_call(call_id, call.function.name, msgspec.json.encode(call.function.arguments).decode())
            for call_id, call in zip(ids, message.tool_calls, strict=True)
        ]
    if message.role == "tool":
        rendered["tool_call_id"] = message.tool_call_id or (waiting.pop(0) if waiting else "")
        if message.tool_name:
            rendered["name"] = message.tool_name
    return rendered


class ModelRef(Fields, kw_only=True):
    """Older clients say `name`."""

    model: str = ""
    name: str = ""
    verbose: bool = False
    stream: bool = True
    insecure: bool = False


class AnswerMessage(Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """One line of an answer. The last, with `done`, has times in nanoseconds, and how many tokens there were."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Details(Struct):
    """`quantization_level` is how the layers are packed here."""

    family: str
    quantization_level: str
    format: str = "core"
    parent_model: str = ""
    parameter_size: str = ""
    families: Sequence[str] = ()


class ListedModel(Struct):
    """`size` is that of the layers in bytes, 0 before the model is open. There is no digest of a whole model."""

    name: str
    model: str
    modified_at: str
    size: int
    details: Details
    digest: str = ""


class ListedModels(Struct):
    models: list[ListedModel]


class Shown(Struct):
    modified_at: str
    template: str
    details: Details
    model_info: Mapping[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""


class Version(Struct):
    version: str


class Pulled(Struct):
    status: str
