"""What passes through the route at once: rows of sessions, and what they bring them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.coordinator.session import Session
from core.errors import CoreError
from core.interfaces.engine import Delta, FinishReason, TokenLogprob
from core.protocol.messages import Run, RunDecode, RunPrefill, Segment, Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """A session's rows in a batch: `tokens` from position `start` on, the last `drafts` of them only guessed.

    The last `outputs` rows are wanted back; none where a prompt goes on.
    """

    session: Session
    start: int
    tokens: list[int]
    drafts: int
    outputs: int

    @property
    def end(self) -> int:
        """So many tokens are cached once the batch has passed, if no draft comes true."""
        return self.start + len(self.tokens) - self.drafts

    @property
    def is_last(self) -> bool:
        """Whether a token can be sampled from what comes back: no prompt goes on."""
        return self.end == len(self.session.tokens)


def prefill_entry(session: Session, rows: int) -> Entry:
    """The next `rows` of what is not cached, or fewer where there are no more."""
    start = session.cached
    tokens = session.tokens[start : start + rows]
    is_last = start + len(tokens) == len(session.tokens)
    outputs = len(tokens) if session.decoding.wants_prompt_logprobs else int(is_last)
    return _entry(session, start, tokens, 0, outputs)


def decode_entry(session: Session) -> Entry:
    """The last token, and what is guessed to follow it, as far as there is room for that."""
    drafts = session.decoding.draft(session.tokens, room=session.reserved - len(session.tokens))
    return _entry(session, session.cached, [session.tokens[-1], *drafts], len(drafts), 1 + len(drafts))


def _entry(session: Session, start: int, tokens: list[int], drafts: int, outputs: int) -> Entry:
    session.most_cached = max(session.most_cached, start + len(tokens))
    return Entry(session, start, tokens, drafts, outputs)


class Batch:
    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.tokens = [token for entry in entries for token in entry.tokens]
        self.decodes = all(entry.session.answered for entry in entries)
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Since it was made up."""
        return time.perf_counter() - self._began

    def message(self, epoch: int, hidden: Tensor) -> Run:
        """`hidden` are its tokens' embeddings. Batches of decode steps alone may overtake others on a link."""
        segments = [Segment(one.session.cache, one.start, len(one.tokens), one.outputs) for one in self.entries]
        return (RunDecode if self.decodes else RunPrefill)(epoch, segments, hidden)


@dataclass(slots=True)
class Outcome:
    """What a batch has brought one of its sessions: tokens, or an error."""

    entry: Entry
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: CoreError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether a decode step follows."""
        return bool(self.tokens) and self.finish is None and self.error is None

    @property
    def delta(self) -> Delta:
        return Delta(self.text, self.entry.session.decoding.tokens, self.finish, tuple(self.logprobs))

    def apply(self, seconds: float) -> None:
        """Adds the tokens to the session's; the step took so long."""
        session, entry = self.entry.session, self.entry
        if self.error is not None or not entry.outputs:
            return
        accepted = max(0, len(self.tokens) - 1)
        session.cached = entry.end + accepted
        session.tokens += self.tokens
        if self.tokens:
            if session.answered:
                session.decoding.speculation.note(entry.drafts, accepted, seconds)
            session.answered = True
