"""Thoughts told apart from answers."""

from __future__ import annotations

import pytest

from core.gateway.dialects.calls import CallReader
from core.gateway.dialects.forms import HERMES
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from core.gateway.dialects.reader import Reader
from core.gateway.dialects.template import Template
from core.gateway.dialects.thinking import Thinking, ThoughtReader
from core.interfaces.engine import ChatTemplate


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


def split(pieces: list[Piece]) -> tuple[str, str]:
    assert all(not isinstance(piece, CallBegins) and piece.text for piece in pieces)
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nWhy  not?\n</think>\n\nYes.\n", "Why  not?", "Yes.\n"),
        (False, "\n<think>a</thin></think>b </think> <think>", "a</thin>", "b </think> <think>"),
        (False, "  Just an answer. <think>", "", "  Just an answer. <think>"),
        (False, "<thi", "", "<thi"),
        (False, "<think>cut off </th", "cut off </th", ""),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (True, "Hm.\n\n</think>\nYes", "Hm.", "Yes"),
        (True, "\n<think>\nHm.</think>Yes", "Hm.", "Yes"),
        (True, "cut off\n", "cut off", ""),
        (True, "<th", "<th", ""),
        (True, "</think>Yes", "", "Yes"),
        (True, "", "", ""),
    ],
)
def test_thoughts_are_the_same_wherever_the_text_is_cut(opened: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        reader = ThoughtReader(opened=opened)
        out = [*(each for piece in pieces for each in reader.push(piece)), *reader.finish()]
        assert split(out) == (reasoning, content), pieces


def test_thoughts_are_not_held_back() -> None:
    reader = ThoughtReader(opened=True)
    assert reader.push("Hm") == [Reasoning("Hm")]
    assert reader.push(", well") == [Reasoning(", well")]


@pytest.mark.parametrize(
    ("opened", "text"), [(False, "<think>|one| two|</think>|Yes|."), (True, "one| two|.|!|</think>|A")]
)
def test_reasoning_tokens_are_those_up_to_the_closing_marker(opened: bool, text: str) -> None:
    reader = Reader(ThoughtReader(opened=opened))
    for tokens, piece in enumerate(text.split("|"), 1):
        reader.push(piece, tokens)
    assert reader.reasoning_tokens == text.split("|").index("</think>") + 1


def test_an_answer_without_thoughts_has_no_reasoning_tokens() -> None:
    reader = Reader(ThoughtReader(opened=False))
    reader.push("Yes", 1)
    assert reader.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>Hm. </thin", "Hm. ", ""),
        (False, "<thi", "", ""),
        (True, "Hm. <", "Hm. <", ""),
        (True, "</t", "", ""),
    ],
)
def test_of_thoughts_that_are_cut_no_markup_is_left(opened: bool, text: str, reasoning: str, content: str) -> None:
    reader = ThoughtReader(opened=opened)
    out = [*reader.push(text), *reader.finish(cut=True)]
    assert "".join(piece.text for piece in out if isinstance(piece, Reasoning)) == reasoning.rstrip()
    assert "".join(piece.text for piece in out if isinstance(piece, Content)) == content


def test_calls_come_after_thoughts_and_never_within() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could say {call}.</think>\n\n{call}"
    for pieces in cuts(text):
        reader = Reader(ThoughtReader(opened=False), CallReader(HERMES, ["f"]))
        out = [*(each for piece in pieces for each in reader.push(piece, 1)), *reader.finish()]
        begins = next(i for i, piece in enumerate(out) if isinstance(piece, CallBegins))
        assert split(out[:begins]) == (f"I could say {call}.", "")
        assert "".join(piece.text for piece in out[begins + 1 :] if isinstance(piece, CallArguments)) == "{}"
        assert reader.called


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n<think>\n", Thinking.OPENED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.NONE),
        ("<|im_start|>assistant\n", Thinking.POSSIBLE),
    ],
)
def test_the_prompt_says_whether_thoughts_have_begun(prompt: str, thinking: Thinking) -> None:
    assert Thinking.after(prompt) is thinking


def test_a_template_knows_the_variables_that_its_code_looks_at() -> None:
    template = Template(ChatTemplate("You may use tools. <think>\n\n</think>", frozenset({"enable_thinking"})))
    assert template.thinks
    assert template.knows("enable_thinking")
    assert not template.knows("tools")
    assert not Template(ChatTemplate("")).thinks
