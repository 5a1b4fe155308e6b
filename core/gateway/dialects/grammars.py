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
from core.gateway.dialects.thinking import CLOSE, OPEN, Thinking
from core.interfaces.engine import Grammar

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_BLANKS = r"[ \n\r\t]{1,40}"
"""Between what JSON is made of. It ends: a model that is unsure likes to go on with blanks."""
_SPACE = r"ws: /\s{0,4}/"
_THOUGHT = rf"""thought: {json.dumps(OPEN)} thoughts
thoughts[suffix={json.dumps(CLOSE)}]: /(.|\n)*/"""
_PLAIN = r"plain: /\s*[^{\s](.|\n)*/"


@dataclass(frozen=True, slots=True)
class Function:
    """A function on offer; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def told(self) -> dict[str, Any]:
        """The function as templates expect it: all that they look at is there."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else dict(self.parameters)
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


def calls_only(form: Form, functions: Sequence[Function], thinking: Thinking, *, one: bool) -> Grammar:
    """Nothing but calls, and one at least; thoughts may come before them."""
    start = f"{_literal(form.open)}? ws {_calls(form, one=one)}"
    return _after_thoughts(start, _call_rules(form, functions), thinking)


def answer_or_calls(
    schema: Mapping[str, Any], form: Form, functions: Sequence[Function], thinking: Thinking, *, one: bool
) -> Grammar:
    """JSON of `schema`, or calls; thoughts may come before either. Not for forms whose calls have no marker."""
    rules = [f"answer: {_json(schema)}", *_call_rules(form, functions)]
    return _after_thoughts(f"answer | {_literal(form.open)} ws {_calls(form, one=one)}", rules, thinking)


def answer_only(schema: Mapping[str, Any], thinking: Thinking) -> Grammar:
    """JSON of `schema`; thoughts may come before it."""
    if thinking is Thinking.POSSIBLE:
        return _after_thoughts("answer", [f"answer: {_json(schema)}"], thinking)
    trigger = CLOSE if thinking is Thinking.OPENED else ""
    if schema is ANY_OBJECT:
        return Grammar("json_object", trigger=trigger)
    return Grammar("json_schema", json.dumps(schema), trigger)


def strict_calls(form: Form, functions: Sequence[Function], *, one: bool) -> Grammar:
    """Any text; but what begins as a call is one, with arguments that fit its function's schema.

    Where calls have no marker, that is whatever begins with a brace.
    """
    rules = _call_rules(form, functions)
    if form.bare:
        return _lark(f"(plain | {_calls(form, one=one)})?", [_PLAIN, *rules])
    return _lark(f"ws {_calls(form, one=one)}", rules, trigger=form.open)


def _after_thoughts(start: str, rules: Sequence[str], thinking: Thinking) -> Grammar:
    match thinking:
        case Thinking.OPENED:
            return _lark(f"ws ({start})", rules, trigger=CLOSE)
        case Thinking.POSSIBLE:
            return _lark(f"thought? ws ({start})", [_THOUGHT, *rules])
        case _:
            return _lark(start, rules)


def _calls(form: Form, *, one: bool) -> str:
    """Calls from behind the first `open` on."""
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


def _call_rules(form: Form, functions: Sequence[Function]) -> list[str]:
    names = [f"call_{i}" for i in range(len(functions))]
    calls = [f"{name}: {_call(form, function)}" for name, function in zip(names, functions, strict=True)]
    return [f"call: {' | '.join(names)}", *calls]


def _call(form: Form, function: Function) -> str:
    arguments = _json(_NO_PARAMETERS if function.parameters is None else function.parameters)
    if form.prefers_named:
        return f"{_literal(function.name + form.named)} {arguments}"
    head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
    return f'{_literal(head)} {arguments} "}}"'


def _lark(start: str, rules: Sequence[str], trigger: str = "") -> Grammar:
    return Grammar("lark", "\n".join((f"start: {start}", _SPACE, *rules, "")), trigger)


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _BLANKS}, **schema})}"
