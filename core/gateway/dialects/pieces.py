"""What a model's text is read as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The call number `index` of the answer: to which function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: a fragment of a JSON object's text."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallBegins | CallArguments


def beginning_of(marker: str, text: str) -> int:
    """The length of the longest end of `text` that may become `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)


def without_begun(marker: str, text: str) -> str:
    """`text` without a beginning of `marker` at its end; a single character may as well be text."""
    length = beginning_of(marker, text)
    return text[:-length] if length > 1 else text


def settled(text: str, marker: str) -> int:
    """How much of `text` can be told apart from `marker` and from whitespace around it, whatever follows."""
    return len(text[: len(text) - beginning_of(marker, text)].rstrip())
