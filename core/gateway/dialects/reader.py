"""One generation's text, read as reasoning, content and tool calls."""

from __future__ import annotations

from core.gateway.dialects.calls import CallReader
from core.gateway.dialects.pieces import Content, Piece
from core.gateway.dialects.thinking import ThoughtReader
from core.interfaces.engine import Delta


class Reader:
    """Made for one generation; without a reader of thoughts or of calls, that part is content."""

    def __init__(self, thoughts: ThoughtReader | None = None, calls: CallReader | None = None) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether a function was called."""
        return self._calls is not None and self._calls.called

    def read(self, delta: Delta) -> list[Piece]:
        """The pieces that a step completes, and with the last one what was held back."""
        pieces = self.push(delta.text, delta.tokens)
        return pieces + self.finish(cut=delta.finish_reason == "length") if delta.finish_reason else pieces

    def push(self, text: str, tokens: int) -> list[Piece]:
        """The pieces that `text` completes; `tokens` are those of the generation so far."""
        if self._thoughts is None:
            return self._with_calls([Content(text)] if text else [])
        was_thinking = self._thoughts.thinking
        pieces = self._with_calls(self._thoughts.push(text))
        if was_thinking or self._thoughts.thinking:
            self.reasoning_tokens = tokens
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, once no text follows. Of a text that was cut, markup that has only begun is left out."""
        pieces = self._with_calls(self._thoughts.finish(cut=cut)) if self._thoughts else []
        return pieces + self._calls.finish(cut=cut) if self._calls else pieces

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        split: list[Piece] = []
        for piece in pieces:
            split += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return split
