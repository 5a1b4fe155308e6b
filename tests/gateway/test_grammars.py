"""What the grammars let a model write, by the library that engines hold models to them with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from core.gateway.dialects.forms import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, Form
from core.gateway.dialects.grammars import (
    ANY_OBJECT,
    Function,
    answer_only,
    answer_or_calls,
    calls_only,
    strict_calls,
)
from core.gateway.dialects.thinking import Thinking
from core.interfaces.engine import Grammar

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/Name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string", "maxLength": 20}},
}
FUNCTIONS = (Function("get_weather", None, CITY), Function("now"))
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
PARIS = '{"city": "Paris"}'

WEATHER = {
    HERMES: f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
    LLAMA: f'{{"name": "get_weather", "parameters": {PARIS}}}',
    MISTRAL: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]',
    MISTRAL_NAMED: f"[TOOL_CALLS]get_weather[ARGS]{PARIS}",
}
TWO = {
    HERMES: WEATHER[HERMES] + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    MISTRAL: WEATHER[MISTRAL][:-1] + ', {"name": "now", "arguments": {}}]',
    MISTRAL_NAMED: WEATHER[MISTRAL_NAMED] + "[TOOL_CALLS]now[ARGS]{}",
}


def fits(grammar: Grammar, text: str) -> bool:
    """Whether `text` is what `grammar` says, to the end; from behind the trigger on, where there is one."""
    tokenizer = LLTokenizer("byte")
    compiled = {
        "lark": LLMatcher.grammar_from_lark,
        "json_schema": LLMatcher.grammar_from_json_schema,
        "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}'),
    }[grammar.kind](grammar.text)
    matcher = LLMatcher(tokenizer, compiled)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text.partition(grammar.trigger)[2] if grammar.trigger else text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("form", WEATHER)
def test_calls_only_are_calls_of_the_functions_with_arguments_that_fit(form: Form) -> None:
    grammar = calls_only(form, FUNCTIONS, Thinking.NONE, one=False)
    assert fits(grammar, WEATHER[form])
    assert form.single or fits(grammar, TWO[form])
    assert fits(grammar, WEATHER[form].removeprefix(form.open))
    assert not fits(grammar, WEATHER[form].replace("city", "town"))
    assert not fits(grammar, WEATHER[form].replace("get_weather", "delete_all"))
    assert not fits(grammar, WEATHER[form].replace(PARIS, "{}"))
    assert not fits(grammar, WEATHER[form].replace(": ", ":" + " " * 50))
    assert not fits(grammar, WEATHER[form].replace(PARIS, PARIS.replace(" ", "\u00a0")))
    assert not fits(grammar, form.open + "\u00a0" + WEATHER[form].removeprefix(form.open))
    assert not fits(grammar, "Hello")
    assert not fits(grammar, "")


@pytest.mark.parametrize("form", WEATHER)
def test_one_call_only(form: Form) -> None:
    grammar = calls_only(form, FUNCTIONS, Thinking.NONE, one=True)
    assert fits(grammar, WEATHER[form])
    assert not fits(grammar, TWO.get(form, 2 * WEATHER[form]))


@pytest.mark.parametrize("form", WEATHER)
def test_strict_calls_leave_other_text_alone(form: Form) -> None:
    grammar = strict_calls(form, FUNCTIONS, one=False)
    assert fits(grammar, WEATHER[form])
    assert form.single or fits(grammar, TWO[form])
    assert not fits(grammar, WEATHER[form].replace("city", "town"))
    if form is LLAMA:
        assert fits(grammar, "Hello {you}")
        assert not fits(grammar, '{"city": "Paris"}')
    else:
        assert grammar.trigger == form.open


@pytest.mark.parametrize("form", [form for form in WEATHER if not form.bare])
def test_an_answer_that_fits_or_calls(form: Form) -> None:
    grammar = answer_or_calls(ANSWER, form, FUNCTIONS, Thinking.NONE, one=False)
    assert fits(grammar, '{"n": 1}')
    assert fits(grammar, TWO[form])
    assert not fits(grammar, '{"n": 1}' + WEATHER[form])
    assert not fits(grammar, '{"n": "one"}')


def test_an_answer_that_fits() -> None:
    grammar = answer_only(ANSWER, Thinking.NONE)
    assert (grammar.kind, json.loads(grammar.text), grammar.trigger) == ("json_schema", ANSWER, "")
    assert fits(grammar, '{"n": 1}')
    assert not fits(grammar, '{"n": 1.5}')
    assert answer_only(ANY_OBJECT, Thinking.NONE) == Grammar("json_object")


GRAMMARS: list[tuple[Any, str, str]] = [
    (lambda thinking: answer_only(ANSWER, thinking), '{"n": 1}', '{"m": 1}'),
    (lambda thinking: answer_only(ANY_OBJECT, thinking), '{"m": [{}]}', "[1]"),
    (lambda thinking: calls_only(LLAMA, FUNCTIONS, thinking, one=True), WEATHER[LLAMA], "Hello"),
    (lambda thinking: answer_or_calls(ANSWER, HERMES, FUNCTIONS, thinking, one=False), TWO[HERMES], "Hello"),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS)
def test_thoughts_are_free(grammar: Any, right: str, wrong: str) -> None:
    opened, possible = grammar(Thinking.OPENED), grammar(Thinking.POSSIBLE)
    assert opened.trigger == "</think>"
    assert fits(opened, f"I say {wrong} {{</think>{right}")
    assert not fits(opened, f"Hm.</think>{wrong}")
    assert possible.trigger == ""
    assert fits(possible, f"<think>\nI say {wrong} {{\n</think>\n\n{right}")
    assert fits(possible, right)
    assert not fits(possible, f"<think></think>{wrong}")
    assert not fits(possible, wrong)
