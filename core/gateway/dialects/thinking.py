"""Thoughts between `<think>` and `</think>`, told apart from the answer."""

from __future__ import annotations

from enum import Enum, auto

from core.gateway.dialects.pieces import Content, Piece, Reasoning, settled, without_begun

OPEN, CLOSE = "<think>", "</think>"


class Thinking(Enum):
    """Where a text has thoughts: nowhere, from its first character on (the prompt opened them), or where it says so."""

    NONE = auto()
    OPENED = auto()
    POSSIBLE = auto()

    @classmethod
    def after(cls, prompt: str) -> Thinking:
        """How a model that may think goes on behind `prompt`."""
        prompt = prompt.rstrip()
        if prompt.endswith(CLOSE):
            return cls.NONE
        return cls.OPENED if prompt.endswith(OPEN) else cls.POSSIBLE


class _Part(Enum):
    UNDECIDED = auto()
    THOUGHT = auto()
    GAP = auto()
    ANSWER = auto()


class ThoughtReader:
    """Splits a text into reasoning and content, the same wherever the text is cut into pieces.

    Thoughts come before the answer or not at all. `opened` says that the prompt ends with `<think>`, so that the text
    begins within them. Whitespace around the markers belongs to neither side.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._part = _Part.UNDECIDED
        self._held = ""
        self._begun = False

    @property
    def thinking(self) -> bool:
        return self._part is _Part.THOUGHT or (self._part is _Part.UNDECIDED and self._opened)

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._part is _Part.UNDECIDED:
            self._decide()
        if self._part is _Part.THOUGHT:
            pieces += self._thought()
        if self._part is _Part.GAP:
            self._held = self._held.lstrip()
            self._part = _Part.ANSWER if self._held else _Part.GAP
        if self._part is _Part.ANSWER and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, once no text follows. Of a text that was cut, a marker that only began is left out."""
        held, self._held = self._held, ""
        if cut:
            held = without_begun(CLOSE if self.thinking else OPEN, held)
        if self.thinking:
            held = held.rstrip() if self._begun else held.strip()
            return [Reasoning(held)] if held else []
        return [Content(held)] if held else []

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._enter_thought(begun.removeprefix(OPEN))
        elif not OPEN.startswith(begun):
            if self._opened:
                self._enter_thought(begun)
            else:
                self._part = _Part.ANSWER

    def _enter_thought(self, text: str) -> None:
        self._held = text
        self._part = _Part.THOUGHT

    def _thought(self) -> list[Piece]:
        if not self._begun:
            self._held = self._held.lstrip()
        thought, close, rest = self._held.partition(CLOSE)
        if close:
            self._held, self._part = rest, _Part.GAP
            thought = thought.rstrip()
        else:
            end = settled(thought, CLOSE)
            thought, self._held = thought[:end], thought[end:]
        self._begun = self._begun or bool(thought)
        return [Reasoning(thought)] if thought else []
