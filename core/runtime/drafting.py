"""Drafts of a session's next tokens from its own text: prompt lookup decoding (A. Saxena, November 2023)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that are looked for in it."""


class Drafter:
    """An index of where the last few tokens have occurred before. A token costs the same however long the text is."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[int, int] = {}
        """By an n-gram's hash, the position behind its latest occurrence that something follows.

        Two n-grams with the same hash cost a wrong guess.
        """

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        for token in tokens:
            position = len(self._tokens)
            for gram in self._endings():
                self._after[gram] = position
            self._tokens.append(token)

    def draft(self, limit: int) -> list[int]:
        """What followed the latest earlier occurrence of the text's end, of its last 4 tokens or else of 3 or 2.

        At most `limit` tokens, fewer only where there is no such occurrence: then none. A text that has come to
        repeat itself is drafted as if it went on doing so.
        """
        found = next((self._after[gram] for gram in self._endings() if gram in self._after), None)
        if found is None:
            return []
        period = len(self._tokens) - found
        followed = self._tokens[found : found + limit]
        while len(followed) < limit:
            followed.append(followed[-period])
        return followed

    def _endings(self) -> list[int]:
        lengths = range(min(LONGEST, len(self._tokens)), SHORTEST - 1, -1)
        return [hash(tuple(self._tokens[-length:])) for length in lengths]
