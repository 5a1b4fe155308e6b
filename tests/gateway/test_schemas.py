"""What a schema holds a text to, by the library that engines hold models to it with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from core.errors import RequestError
from core.gateway.dialects import schemas
from core.gateway.dialects.forms import HERMES
from core.gateway.dialects.grammars import Function, calls_only
from core.gateway.dialects.schemas import MAX_PARTS, enforced, enforced_arguments
from core.gateway.dialects.thinking import Thinking

TOKENIZER = LLTokenizer("byte")
S = {"type": "string"}
A = {"type": "object", "properties": {"a": S}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"properties": {"z": S}}}, "required": ["b"]}
C = {"properties": {"c": S}}
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def fault(schema: Any) -> str:
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher.validate_grammar(grammar, TOKENIZER)


def fits(schema: Any, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, json.dumps({"grammars": [{"json_schema": schema}]}))
    assert not matcher.get_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, ['{"a": "x"}'], ['{"a": "x", "b": 1}']),
        ({"properties": {}}, ["{}"], ['{"b": 1}']),
        ({**A, "additionalProperties": True}, ['{"a": "x", "b": 1}'], []),
        ({**A, "additionalProperties": {"type": "null"}}, ['{"a": "x", "b": null}'], ['{"a": "x", "b": 1}']),
        ({**A, "unevaluatedProperties": False}, ['{"a": "x"}'], ['{"a": "x", "b": 1}']),
        ({"type": "object"}, ['{"b": 1}'], []),
        ({"type": "array", "items": A}, ['[{"a": "x"}]'], ['[{"a": "x", "b": 1}]']),
        ({"properties": {"properties": A, "format": S}}, ['{"format": "x"}'], ['{"properties": {"a": "x", "b": 1}}']),
        ({"anyOf": [A, B]}, ['{"a": "x"}', '{"b": {}}'], ['{"a": "x", "b": {}}', '{"b": {"y": 1}}']),
        ({"allOf": [A]}, ['{"a": "x"}'], ['{"a": "x", "b": {}}']),
        ({"allOf": [A, B]}, ['{"a": "x", "b": {}}'], ['{"a": "x"}', '{"a": "x", "b": {}, "c": 1}']),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a": "x", "b": {}, "c": 1}'], []),
        ({**A, "anyOf": [B, C]}, ['{"a": "x", "b": {}}', '{"a": "x", "c": "y"}'], ['{"a": "x", "b": {}, "d": 1}']),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, ['{"a": "x"}'], ['{"a": "x", "c": 1}']),
        (
            {"definitions": {"a/b": A}, "allOf": [{"$ref": "#/definitions/a~1b"}, B]},
            ['{"a": "x", "b": {}}'],
            ['{"a": "x", "b": {}, "c": 1}'],
        ),
        (
            {"$defs": {"A": {**A, "properties": {"a": S, "k": {"$ref": "#/$defs/A"}}}, "open-0": S}}
            | {"properties": {"b": {"$ref": "#/$defs/open-0"}}, "$ref": "#/$defs/A"},
            ['{"b": "y", "a": "x", "k": {"a": "z"}}'],
            ['{"b": "y", "a": "x", "k": {"a": "z", "b": "q"}}', '{"b": 1, "a": "x"}'],
        ),
    ],
)  # fmt: skip
def test_an_object_has_the_properties_that_are_told(schema: Any, right: list[str], wrong: list[str]) -> None:
    closed = enforced(schema)
    assert [text for text in right if not fits(closed, text)] == []
    assert [text for text in wrong if fits(closed, text)] == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a": 1}'),
        ({"type": "object", "propertyNames": {}, "dependentRequired": {}, "unevaluatedProperties": True}, '{"a": 1}'),
        ({**S, "format": "int64", "not": False, "if": {}, "minContains": 1, "$schema": "draft"}, '"x"'),
        ({"type": "integer", "minimum": LOWEST, "maximum": HIGHEST}, str(LOWEST)),
        ({"type": "integer", "exclusiveMinimum": LOWEST + 1}, "0"),
        ({"type": "integer", "maximum": 2**64 - 1}, str(2**64 - 1)),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, "-1.5"),
        ({**S, "maxLength": HIGHEST}, '"x"'),
        ({"type": "array", "maxItems": 2**64}, "[1]"),
    ],
)
def test_what_asks_for_nothing_changes_nothing(schema: Any, text: str) -> None:
    assert fits(enforced(schema), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"propertyNames": {"pattern": "a"}},
        {"not": {"type": "null"}},
        {"if": {}, "then": {}},
        {"contains": {}, "minContains": 1},
        {"properties": []},
        {"$defs": 3, "definitions": {"A": A}, "allOf": [{"$ref": "#/definitions/A"}, {"uniqueItems": True}]},
    ],
)
def test_what_asks_for_something_stays(schema: Any) -> None:
    assert fault(enforced(schema))


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": 3, "maximum": 5}, {**S, "maxLength": 2**32 - 1}])
def test_bounds_that_can_be_held_stay(schema: Any) -> None:
    assert enforced(schema) == schema
    assert not fault(schema)


def test_the_formats_that_are_kept_are_those_that_can_be_enforced() -> None:
    assert [name for name in sorted(schemas._FORMATS) if fault({**S, "format": name})] == []
    others = ("regex", "iri", "uri-reference", "json-pointer", "byte", "int32", "password", "")
    assert [name for name in others if not fault({**S, "format": name})] == []


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": ["object", "null"]},
        {"type": "string"},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"$defs": {"A": {"anyOf": [{"type": "object"}, {"type": "null"}]}}, "$ref": "#/$defs/A"},
    ],
)
def test_arguments_are_an_object(parameters: Any) -> None:
    held = enforced_arguments(parameters)
    assert [text for text in ("{}", "true", "null", '"x"', "[]") if fits(held, text)] == ["{}"]


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = {}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(RequestError) as caught:
        enforced(schema)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("name", ["many parts", "many names of one part", "many references", "composed, deep"])
def test_a_schema_that_would_hold_up_everybody_is_refused_at_once(name: str) -> None:
    part: Any = {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    deep: Any = part
    for _ in range(200):
        deep = {"allOf": [deep]}
    schemas: dict[str, Any] = {
        "many parts": {"properties": {str(i): {} for i in range(MAX_PARTS)}},
        "many names of one part": {"x": [part], "allOf": [{"$ref": f"#/x/{'0' * i}"} for i in range(1, 400)]},
        "many references": {"allOf": [{"$ref": f"#/allOf/{i}"} for i in range(MAX_PARTS // 2)]},
        "composed, deep": deep,
    }
    with pytest.raises(RequestError, match="too large"):
        enforced(schemas[name])


def test_the_parts_of_all_functions_count_together() -> None:
    parameters = {"properties": {str(i): {} for i in range(MAX_PARTS // 8)}}
    functions = [Function(f"f{i}", parameters=parameters) for i in range(3)]
    assert calls_only(HERMES, functions[:2], Thinking.NONE, one=True)
    with pytest.raises(RequestError, match="too large"):
        calls_only(HERMES, functions, Thinking.NONE, one=True)


def test_an_anchor_is_no_reference_to_the_root() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "allOf": [{"$ref": "#elsewhere"}]}
    assert enforced(schema)["allOf"] == [{"$ref": "#elsewhere"}]


def test_references_that_go_round_come_to_an_end() -> None:
    definitions = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{(i + 1) % 30}"}] * 2} for i in range(30)}
    assert enforced({"$defs": definitions, "$ref": "#/$defs/A0"})["$ref"] == "#/$defs/A0"
