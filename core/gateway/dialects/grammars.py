"""Grammars that hold a model's text to tool calls, or to JSON of a schema.

Lark in llguidance's dialect (github.com/guidance-ai/llguidance, docs/syntax.md): `%json` is a schema, and a rule with a
`suffix` ends where that text first appears. A model may begin a call with a token of its own that stands for the
form's `open`, or be kept from it where that token is special; so `open` is optional where nothing but calls may come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.gateway.dialects.forms import Form
from core.gateway.dialects.schemas import PartCount, enforced, enforced_arguments
from core.gateway.dialects.thinking import CLOSE, OPEN, Thinking
from core.interfaces.engine import Grammar

ANSWER = "the answer"
"""What errors call the schema of an answer."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_BLANKS = r"[ \n\r\t]{1,40}"
"""Between what JSON is made of. It ends: a model that is unsure likes to go on with blanks."""
_SPACE = r"ws: /[ \t\r\n]{0,4}/"
_THOUGHT = rf"""thought: {json.dumps(OPEN)} thoughts
thoughts[suffix={json.dumps(CLOSE)}]: /(.|\n)*/"""
_PLAIN = r"plain: /\s*[^{\s](.|\n)*/"


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """A schema as `enforced` makes it, and what errors call it."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Function:
    """A function on offer; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema_name(self) -> str:
        """What errors call the schema of its arguments."""
        return f"tool {self.name!r}"

    def told(self) -> dict[str, Any]:
        """The function as templates expect it: all that they look at is there."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else dict(self.parameters)
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


def calls_only(form: Form, functions: Sequence[Function], thinking: Thinking, *, one: bool) -> Grammar:
    """Nothing but calls, and one at least; thoughts may come before them."""
    calls = _Calls(form, functions)
    return _after_thoughts(f"{_literal(form.open)}? ws {calls.start(one=one)}", calls.rules, thinking, calls.schemas)


def answer_or_calls(
    schema: Mapping[str, Any], form: Form, functions: Sequence[Function], thinking: Thinking, *, one: bool
) -> Grammar:
    """JSON of `schema`, or calls; thoughts may come before either. Not for forms whose calls have no marker."""
    calls, answer = _Calls(form, functions), _answer(schema)
    start = f"answer | {_literal(form.open)} ws {calls.start(one=one)}"
    rules = [f"answer: {_json(answer.schema)}", *calls.rules]
    return _after_thoughts(start, rules, thinking, [answer, *calls.schemas])


def answer_only(schema: Mapping[str, Any], thinking: Thinking) -> Grammar:
    """JSON of `schema`; thoughts may come before it."""
    answer = _answer(schema)
    if thinking is Thinking.POSSIBLE:
        return _after_thoughts("answer", [f"answer: {_json(answer.schema)}"], thinking, [answer])
    trigger = CLOSE if thinking is Thinking.OPENED else ""
    if schema is ANY_OBJECT:
        return Grammar("json_object", trigger=trigger)
    return Grammar("json_schema", json.dumps(answer.schema), trigger)


def strict_calls(form: Form, functions: Sequence[Function], *, one: bool) -> Grammar:
    """Any text; but what begins as a call is one, with arguments that fit its function's schema.

    Where calls have no marker, that is whatever begins with a brace.
    """
    calls = _Calls(form, functions)
    if form.bare:
        return _lark(f"(plain | {calls.start(one=one)})?", [_PLAIN, *calls.rules], calls.schemas)
    return _lark(f"ws {calls.start(one=one)}", calls.rules, calls.schemas, trigger=form.open)


def _answer(schema: Mapping[str, Any]) -> NamedSchema:
    return NamedSchema(ANSWER, enforced(schema))


def _after_thoughts(start: str, rules: Sequence[str], thinking: Thinking, schemas: Sequence[NamedSchema]) -> Grammar:
    match thinking:
        case Thinking.OPENED:
            return _lark(f"ws ({start})", rules, schemas, trigger=CLOSE)
        case Thinking.POSSIBLE:
            return _lark(f"thought? ws ({start})", [_THOUGHT, *rules], schemas)
        case _:
            return _lark(start, rules, schemas)


class _Calls:
    """Rules of calls of `functions`, and the schemas in them."""

    def __init__(self, form: Form, functions: Sequence[Function]) -> None:
        self._form = form
        parts = PartCount()
        self.schemas = [NamedSchema(each.schema_name, enforced_arguments(each.parameters, parts)) for each in functions]
        names = [f"call_{i}" for i in range(len(functions))]
        calls = zip(names, functions, self.schemas, strict=True)
        self.rules = [
            f"call: {' | '.join(names)}",
            *(f"{name}: {_call(form, function.name, own.schema)}" for name, function, own in calls),
        ]

    def start(self, *, one: bool) -> str:
        """Calls from behind the first `open` on."""
        form = self._form
        open, close = _literal(form.open), _literal(form.close)
        if form.prefers_named:
            first, more = "call", f"({open} call)*"
        elif form.separator:
            first, more = "call", f"(ws {_literal(form.separator)} ws call)*"
        elif form.close:
            first, more = f"call ws {close}", f"(ws {open} ws call ws {close})*"
        else:
            first, more = "call", ""
        calls = first if one else f"{first} {more}"
        return f'"[" {calls} "]"' if form.bracket and not form.prefers_named else calls


def _call(form: Form, name: str, arguments: Mapping[str, Any]) -> str:
    if form.prefers_named:
        return f"{_literal(name + form.named)} {_json(arguments)}"
    head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
    return f'{_literal(head)} {_json(arguments)} "}}"'


def _lark(start: str, rules: Sequence[str], schemas: Sequence[NamedSchema], trigger: str = "") -> Grammar:
    text = "\n".join((f"start: {start}", _SPACE, *rules, ""))
    return Grammar("lark", text, trigger, tuple((each.name, json.dumps(each.schema)) for each in schemas))


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _BLANKS}, **schema})}"
