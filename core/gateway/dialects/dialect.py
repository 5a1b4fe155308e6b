"""What one request asks of the model's text, and how the model is asked and read for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from core.errors import RequestError
from core.gateway.dialects.as_text import as_text
from core.gateway.dialects.calls import CallReader
from core.gateway.dialects.grammars import ANSWER, Function, answer_only, answer_or_calls, calls_only, strict_calls
from core.gateway.dialects.reader import Reader
from core.gateway.dialects.template import Template
from core.gateway.dialects.thinking import Thinking, ThoughtReader
from core.gateway.errors import naming_fields
from core.interfaces.engine import Conversation, GenerationRequest, Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request asks of the text.

    `functions` may be called; `required` says that one must be, `one` that no more may be. `schema` is the JSON schema
    of the answer, where it has one. `effort` is how long to think, `options` what else the chat template is told, and
    `hints` what it is told if it knows it.
    `effort_field` and `schema_field` are how the endpoint calls these, for errors.
    """

    functions: tuple[Function, ...] = ()
    required: bool = False
    one: bool = False
    schema: Mapping[str, Any] | None = None
    effort: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    effort_field: str = "reasoning_effort"
    schema_field: str = "response_format"


def template_options(template: Template, wishes: Wishes) -> dict[str, Any]:
    """What the chat template is told. Raises RequestError where it doesn't know how long to think.

    An effort of "none" turns thinking off, also where the template knows only that, or nothing of thinking.
    """
    options = {**{name: value for name, value in wishes.hints.items() if template.knows(name)}, **wishes.options}
    if wishes.effort is None:
        return options
    if template.knows("reasoning_effort"):
        effort: dict[str, Any] = {"reasoning_effort": wishes.effort}
    elif template.knows("enable_thinking") and wishes.effort == "none":
        effort = {"enable_thinking": False}
    elif wishes.effort == "none" and not template.thinks:
        effort = {}
    else:
        raise RequestError(
            f"'{wishes.effort_field}' is not supported: {wishes.effort!r}",
            "this model's chat template doesn't know it",
            "leave it out",
            param=wishes.effort_field,
            code="unsupported_parameter",
        )
    if any(wishes.options.get(name, value) != value for name, value in effort.items()):
        raise RequestError(
            f"'{wishes.effort_field}' and 'chat_template_kwargs' say different things", param=wishes.effort_field
        )
    return {**effort, **options}


class Dialect:
    """Raises RequestError for wishes that this model can't honour.

    `thinking` is read off the end of the prompt, which `ask` has the words of.
    """

    def __init__(
        self, template: Template, wishes: Wishes, options: Mapping[str, Any], thinking: Thinking = Thinking.NONE
    ) -> None:
        if wishes.functions and not template.takes_tools:
            raise RequestError(
                "this model can't be given functions to call",
                "its chat template has no tool calls, or has them in a form that isn't known here",
                "leave 'tools' out, or have the host give core serve a template like those of Hermes, Qwen, Llama 3.1 "
                "or Mistral (--chat-template FILE), the form of its calls (--tool-format), or --tools-as-text",
                param="tools",
                code="unsupported_parameter",
            )
        self._as_text = template.tools_as_text
        self._form = template.form if wishes.functions else None
        self._one = wishes.one or (self._form is not None and self._form.single)
        self._wishes = wishes
        self._options = options
        self.thinking = thinking
        self._last: tuple[Conversation, Conversation] | None = None
        """The conversation that was told last, and how: the choices of a request have one."""

    @property
    def names(self) -> dict[str, str]:
        """The request's fields that the grammar and the schemas in it are for: see `naming_fields`."""
        of_tools = {function.schema_name: "tools" for function in self._wishes.functions}
        field = "tools" if self._wishes.schema is None or self._wishes.required else self._wishes.schema_field
        return {"grammar": field, ANSWER: self._wishes.schema_field, **of_tools}

    def ask(self, request: GenerationRequest) -> GenerationRequest:
        """The request of a conversation, with the functions on offer and the grammar that the wishes need."""
        if not isinstance(request.prompt, Conversation):
            return request
        marked = self._form is not None or self.thinking is not Thinking.NONE
        prompt, grammar = self.told(request.prompt), self._grammar
        return replace(request, prompt=prompt, grammar=grammar, special_tokens=marked)

    def told(self, conversation: Conversation) -> Conversation:
        """The conversation with the functions on offer, and what else the template is told."""
        if self._last is None or self._last[0] is not conversation:
            tools = tuple(function.told() for function in self._wishes.functions)
            told = replace(conversation, tools=tools, template_options=self._options)
            self._last = conversation, as_text(told) if self._as_text else told
        return self._last[1]

    def reader(self) -> Reader:
        """A fresh one, for one generation's text."""
        thoughts = calls = None
        if self.thinking is not Thinking.NONE:
            thoughts = ThoughtReader(opened=self.thinking is Thinking.OPENED)
        if self._form is not None:
            names = [function.name for function in self._wishes.functions]
            calls = CallReader(self._form, names, one=self._one, forced=self._wishes.required)
        return Reader(thoughts, calls)

    @cached_property
    def _grammar(self) -> Grammar | None:
        with naming_fields(self.names):
            return self._held_to()

    def _held_to(self) -> Grammar | None:
        wishes, form, thinking = self._wishes, self._form, self.thinking
        if form is not None and wishes.required:
            return calls_only(form, wishes.functions, thinking, one=self._one)
        if form is not None and wishes.schema is not None:
            if form.bare:
                raise RequestError(
                    f"'{wishes.schema_field}' and 'tools' don't go together with this model",
                    "it writes calls as plain JSON, which can't be told from an answer in JSON",
                    'ask for one of them, or set \'tool_choice\' to "none" or "required"',
                    param=wishes.schema_field,
                )
            return answer_or_calls(wishes.schema, form, wishes.functions, thinking, one=self._one)
        if wishes.schema is not None:
            return answer_only(wishes.schema, thinking)
        if form is not None and any(function.strict for function in wishes.functions):
            return strict_calls(form, wishes.functions, one=self._one)
        return None
