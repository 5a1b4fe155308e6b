"""When guessing pays: drafts of one session, longer while they come true, none for a while where they cost more."""

from __future__ import annotations

from collections.abc import Sequence

from core.coordinator.chunk_sizing import Average
from core.runtime.drafting import Drafter

LONGEST = 12
SHORTEST = 2
FIRST_REST = 16
LONGEST_REST = 256
"""Steps without drafts after one that did not pay; twice as many each time."""


class Speculation:
    """Lossless: a draft only decides how many tokens one step may bring, never which (Leviathan et al.,
    arXiv:2211.17192; drafts from the text itself: prompt lookup decoding). `drafter` None: never guesses."""

    def __init__(self, drafter: Drafter | None, prompt: Sequence[int] = ()) -> None:
        """Takes a long prompt in at once, which is no work for the event loop."""
        self._drafter = drafter
        self.drafted = self.accepted = 0
        self.extend(prompt)
        self._length = SHORTEST
        self._plain = Average()
        self._rest = FIRST_REST
        self._resting = 0
        self._begin_trial()

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        if self._drafter is not None:
            self._drafter.extend(tokens)

    def draft(self, most: int) -> list[int]:
        """What may follow the text: `most` tokens at most."""
        if self._drafter is None or self._resting or most <= 0:
            return []
        return self._drafter.draft(min(self._length, most))

    def note(self, drafted: int, accepted: int, seconds: float) -> None:
        """What a step of the session brought, and how long it took."""
        if not drafted:
            self._plain.add(seconds)
            self._resting = max(0, self._resting - 1)
            return
        self.drafted += drafted
        self.accepted += accepted
        self._drafted.add(seconds)
        self._brought.add(1 + accepted)
        self._length = min(LONGEST, 2 * self._length) if accepted == drafted else max(SHORTEST, accepted + 1)
        if self._pays():
            self._rest = FIRST_REST
        else:
            self._resting, self._rest = self._rest, min(LONGEST_REST, 2 * self._rest)
            self._begin_trial()

    def _begin_trial(self) -> None:
        self._drafted, self._brought = Average(), Average()

    def _pays(self) -> bool:
        plain, drafted, brought = self._plain.value, self._drafted.value, self._brought.value
        if plain is None or drafted is None or brought is None:
            return True
        return brought * plain > drafted
