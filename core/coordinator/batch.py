"""What passes through the route at once: rows of sessions, and what they bring them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.coordinator.session import Place, Session
from core.errors import CoreError
from core.interfaces.engine import FinishReason, TokenLogprob
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import Run, RunDecode, RunPrefill
from core.runtime.cuts import Cuts


@dataclass(frozen=True, slots=True)
class Entry:
    """A session's rows in a batch: `tokens` from position `start` on, the last `drafts` of them only guessed.

    The last `outputs` rows are wanted back: none if a prompt goes on. `is_last` says whether a token can be sampled
    from what comes back. `decodes` tells a decode step from a prefill.
    """

    session: Session
    place: Place
    start: int
    tokens: Sequence[int]
    drafts: int
    outputs: int
    is_last: bool
    decodes: bool

    @property
    def end(self) -> int:
        """So many tokens are cached once the batch has passed, if no draft comes true."""
        return self.start + len(self.tokens) - self.drafts


def prefill_entry(session: Session, place: Place, rows: int, cuts: Cuts) -> Entry:
    """The next `rows` of what is not cached, or fewer if there are no more, or `cuts` want a chunk to end before."""
    start, length = place.cached, len(session.tokens)
    tokens = session.tokens[start : cuts.chunk_end(start, min(start + rows, length), length)]
    is_last = start + len(tokens) == length
    outputs = len(tokens) if session.wants_prompt_logprobs else int(is_last)
    return Entry(session, place, start, tokens, 0, outputs, is_last, decodes=False)


def decode_entry(session: Session, place: Place, start: int, token: int) -> Entry:
    """The last token, at position `start`, and what is guessed to follow it, as far as there is room for that."""
    drafts = session.decoding.draft(room=place.reserved - start - 1)
    return Entry(session, place, start, [token, *drafts], len(drafts), 1 + len(drafts), True, decodes=True)


class Batch:
    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.tokens = [token for entry in entries for token in entry.tokens]
        self.decodes = all(entry.decodes for entry in entries)
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Since it was composed."""
        return time.perf_counter() - self._began

    def message(self, hop: int, hidden: Tensor) -> Run:
        """To the first hop of a route."""
        segments = [Segment(one.place.cache, one.start, len(one.tokens), one.outputs) for one in self.entries]
        return (RunDecode if self.decodes else RunPrefill)(hop, segments, hidden)


@dataclass(slots=True)
class Outcome:
    """What a batch has brought one of its sessions: tokens with their text, or an error."""

    entry: Entry
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: CoreError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether a decode step follows."""
        return bool(self.tokens) and self.finish is None and self.error is None

    @property
    def accepted(self) -> int:
        """Drafts that came true."""
        return max(0, len(self.tokens) - 1)

    @property
    def cached(self) -> int:
        """So many of the session's tokens are cached."""
        return self.entry.end + self.accepted
