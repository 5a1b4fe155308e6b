"""Tool calls read from a model's text, cut into pieces anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from core.gateway.dialects.calls import CallReader
from core.gateway.dialects.forms import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, Form, form_of
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece

NAMES = ("get_weather", "get_time")
PARIS = '{"city": "Paris"}'
NESTED = '{"a": {"b": [1, {"c": "}\\"{"}]}, "d": "</tool_call> [TOOL_CALLS] ;"}'
ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(*calls: tuple[str, str]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"[TOOL_CALLS][{', '.join(objects)}]"


CALLS: list[tuple[Form, str, str, list[tuple[str, Any]]]] = [
    (HERMES, hermes("get_weather", PARIS), "", [("get_weather", PARIS)]),
    (HERMES, f"Let me look.\n{hermes('get_weather', NESTED)}\n", "Let me look.", [("get_weather", NESTED)]),
    (
        HERMES,
        f"{hermes('get_weather', PARIS)}\n{hermes('get_time', '{}')}",
        "",
        [("get_weather", PARIS), ("get_time", "{}")],
    ),
    (HERMES, f"{hermes('get_time', '{}')}\n\nDone.", "\n\nDone.", [("get_time", "{}")]),
    (HERMES, f'<tool_call>{{"name":"get_time","arguments":{PARIS}}}', "", [("get_time", PARIS)]),
    (HERMES, f'<tool_call>{{"name":"get_time","arguments":{PARIS}</tool_call>', "", [("get_time", PARIS)]),
    (HERMES, f'<tool_call>{{"arguments": {PARIS}, "name": "get_time"}}</tool_call>', "", [("get_time", PARIS)]),
    (
        HERMES,
        '<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": \\"é\\"}"}</tool_call>',
        "",
        [("get_time", '{"zone": "é"}')],
    ),
    (HERMES, '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", "{}")]),
    (HERMES, hermes("get_time", '{"cut": "of'), "", [("get_time", '{"cut": "of}\n</tool_call>')]),
    (LLAMA, llama("get_weather", PARIS), "", [("get_weather", PARIS)]),
    (LLAMA, f"<|python_tag|>{llama('get_weather', NESTED)}", "", [("get_weather", NESTED)]),
    (LLAMA, f'{{"type": "function", "name": "get_time", "parameters": {PARIS}}}', "", [("get_time", PARIS)]),
    (LLAMA, f"Well:\n<|python_tag|>{llama('get_time', '{}')}", "Well:", [("get_time", "{}")]),
    (MISTRAL, mistral(("get_weather", NESTED)), "", [("get_weather", NESTED)]),
    (
        MISTRAL,
        f"Sure. {mistral(('get_weather', PARIS), ('get_time', '{}'))}",
        "Sure.",
        [("get_weather", PARIS), ("get_time", "{}")],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}, "id": "abcdefghi"}, ' + ROME + "]",
        "",
        [("get_time", "{}"), ("get_weather", '{"city": "Rome"}')],
    ),
    (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", [("get_weather", PARIS)]),
    (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather{PARIS}", "", [("get_weather", PARIS)]),
    (
        MISTRAL_NAMED,
        f"Two.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{{}}",
        "Two.",
        [("get_weather", PARIS), ("get_time", "{}")],
    ),
]

NOT_CALLS: list[tuple[Form, str]] = [
    (HERMES, "Plain text with a < b and <tool and <tool_call"),
    (HERMES, "  leading and trailing  \n"),
    (HERMES, "<tool_call>no JSON</tool_call> and more"),
    (HERMES, '<tool_call>{"name": "delete_all", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": </tool_call> so'),
    (HERMES, '<tool_call>{"colour": "red"}</tool_call>'),
    (HERMES, '{"name": "get_time", "arguments": {}}'),
    (HERMES, '<tool_call>{"name": "get_ti'),
    (LLAMA, "Hello; there"),
    (LLAMA, '{"answer": {"name": "get_time"}}'),
    (LLAMA, '{"name": "Anna", "parameters": {}} is one'),
    (LLAMA, "<|python_tag|>print(1)"),
    (LLAMA, f"In JSON: {llama('get_time', '{}')}"),
    (LLAMA, "{ not JSON at all"),
    (MISTRAL, "[TOOL_CALLS] nothing"),
    (MISTRAL, "[TOOL_CALLS][1, 2]"),
    (MISTRAL, "[1, 2] and [TOOL"),
    (MISTRAL_NAMED, "[TOOL_CALLS]delete_all[ARGS]{}"),
    (MISTRAL_NAMED, "[TOOL_CALLS]" + "x" * 300),
]


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, in single characters, in two at every place, and at random ones."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    chance = random.Random(len(text))
    for _ in range(20):
        places = [0, *sorted(chance.choices(range(len(text)), k=6)), len(text)]
        yield [text[a:b] for a, b in pairwise(places)]


def read(reader: CallReader, pieces: list[str]) -> list[Piece]:
    return [*(out for piece in pieces for out in reader.push(piece)), *reader.finish()]


def told(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    content, names, arguments = "", [], []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case CallBegins(index, _, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                assert index == len(names) - 1
                arguments[index] += text
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_are_the_same_wherever_the_text_is_cut(form: Form, text: str, content: str, calls: list[Any]) -> None:
    for pieces in cuts(text):
        assert told(read(CallReader(form, NAMES), pieces)) == (content, calls), pieces


@pytest.mark.parametrize(("form", "text"), NOT_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(form: Form, text: str) -> None:
    for pieces in cuts(text):
        reader = CallReader(form, NAMES)
        assert told(read(reader, pieces)) == (text, []), pieces
        assert not reader.called


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    text = f"<tool_call>oops</tool_call>\n{hermes('get_time', '{}')}"
    for pieces in cuts(text):
        assert told(read(CallReader(HERMES, NAMES), pieces)) == ("<tool_call>oops</tool_call>", [("get_time", "{}")])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, ROME),
        (HERMES, f"\n<tool_call>\n{ROME}\n</tool_call>"),
        (MISTRAL, f"[{ROME}]"),
        (MISTRAL, f"[TOOL_CALLS][{ROME}]"),
        (MISTRAL_NAMED, 'get_weather[ARGS]{"city": "Rome"}'),
        (MISTRAL_NAMED, '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'),
    ],
)
def test_where_calls_are_forced_the_first_marker_may_be_missing(form: Form, text: str) -> None:
    for pieces in cuts(text):
        calls = told(read(CallReader(form, NAMES, forced=True), pieces))
        assert calls == ("", [("get_weather", '{"city": "Rome"}')]), pieces


@pytest.mark.parametrize(("form", "text", "_", "calls"), [each for each in CALLS if len(each[3]) == 2])
def test_one_call_is_all_where_no_more_are_wanted(form: Form, text: str, _: str, calls: list[Any]) -> None:
    for pieces in cuts(text):
        assert told(read(CallReader(form, NAMES, one=True), pieces))[1] == calls[:1]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "get_weather", "arguments": ') == []
    (begins, first) = reader.push('{"city')
    assert isinstance(begins, CallBegins)
    assert begins.name == "get_weather"
    assert first == CallArguments(0, '{"city')
    assert reader.push('": "Pa') == [CallArguments(0, '": "Pa')]
    assert reader.push('ris"}}</tool_call>') == [CallArguments(0, 'ris"}')]


def test_plain_text_is_not_held_back() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push("Hello") == [Content("Hello")]
    assert reader.push(" world") == [Content(" world")]


def test_ids_differ_and_are_such_as_the_template_takes() -> None:
    ids = {form.new_id() for form in (HERMES, LLAMA, MISTRAL, MISTRAL) for _ in range(10)}
    assert len(ids) == 40
    assert all(len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum() for _ in range(50))


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('{"name": <function-name>}</tool_call> <tool_call>', HERMES),
        ("<tool_call><function=example>", None),
        ("<tool_call>{name}<arg_key>", None),
        ("<|python_tag|>", LLAMA),
        ("""ipython {'{"name": "' + tool_call.name + '", "parameters": '}""", LLAMA),
        ("[TOOL_CALLS] [", MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", MISTRAL_NAMED),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_read_off_the_template(template: str, form: Form | None) -> None:
    assert form_of(template) == form


WORDS = r"""
    <tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID]ab [ ] , ; { } {} }} " \ a 1 < : get_time
    "name": {"name":"get_time","arguments":{ "parameters":{ {"name":"get_time","parameters":"{}"} "type":"function",
"""
FRAGMENTS = [*WORDS.split(), " ", "\n"]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("forced", [False, True])
def test_whatever_is_written_reads_the_same_wherever_it_is_cut(form: Form, forced: bool) -> None:
    chance = random.Random(7)
    for _ in range(300):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        whole = told(read(CallReader(form, NAMES, forced=forced), [text]))
        assert whole[1] or whole[0] == text
        for _ in range(3):
            places = [0, *sorted(chance.choices(range(len(text)), k=5)), len(text)]
            pieces = [text[a:b] for a, b in pairwise(places)]
            assert told(read(CallReader(form, NAMES, forced=forced), pieces)) == whole, pieces
        assert told(read(CallReader(form, NAMES, forced=forced), list(text))) == whole, text


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (HERMES, "Let me look.\n<tool_call>\n", "Let me look."),
        (HERMES, 'Let me look.\n<tool_call>\n{"name": "get_w', "Let me look."),
        (HERMES, "Let me look.\n<tool_", "Let me look.\n"),
        (HERMES, "1 <", "1 <"),
        (LLAMA, '{"name": "get_weather", "para', ""),
        (LLAMA, '{"city": ', '{"city": '),
        (MISTRAL, '[TOOL_CALLS][{"arguments": {"city": "Par', ""),
        (MISTRAL, "[TOOL_CA", ""),
        (MISTRAL_NAMED, "[TOOL_CALLS]get_wea", ""),
    ],
)
def test_of_a_text_that_is_cut_no_markup_is_left(form: Form, text: str, content: str) -> None:
    for pieces in cuts(text):
        reader = CallReader(form, NAMES)
        out = [*(each for piece in pieces for each in reader.push(piece)), *reader.finish(cut=True)]
        assert told(out) == (content, [])


def test_whitespace_is_that_of_json() -> None:
    text = '<tool_call>{"name":\u00a0"get_weather", "arguments": {}}</tool_call>'
    assert told(read(CallReader(HERMES, NAMES), [text])) == (text, [])
