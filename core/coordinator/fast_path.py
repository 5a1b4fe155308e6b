"""The fast path of a decode step: an answer comes, tokens are sampled, the next batch leaves, without the event loop.

    trio: the link's task          compute thread                     trio: a lane of the scheduler
    ---------------------          --------------                     -----------------------------
    HIDDEN_STATE is received
    Ticket.succeed ──────────────> Steps.advance
                                     Head.step: logits, tokens, text
                                     next batch composed, embedded,
                                     sent to the first hop
                                   returns a StepResult ────────────> Scheduler._apply: tokens, text and counts
                                                                      of each session, all at once

A session that is `busy` with a batch lends its `decoding` to the compute thread, which alone reads and writes it
meanwhile. Of all else that a session, its place or a scheduler has, the compute thread writes nothing, and reads what
can change under it (whether somebody waits, whether a reader has to catch up) only to decide whether it may go on by
itself: where it errs, a step more is taken, or the lane composes the next batch.

What the compute thread took is always applied: a lane ends with its route only after its last job has come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.coordinator.batch import Batch, Entry, Outcome, decode_entry
from core.coordinator.head import Head
from core.coordinator.route import Route, Ticket
from core.protocol.messages import HiddenState


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a batch brought, `seconds` after it was composed; and the batch that follows it, if the compute thread has
    sent that on its way already."""

    outcomes: list[Outcome]
    seconds: float
    following: tuple[Batch, Ticket] | None


class Steps:
    """Takes decode steps of one route. `may_follow(n)`: whether n sessions may go on before others are looked at."""

    def __init__(self, head: Head, route: Route, may_follow: Callable[[int], bool]) -> None:
        self._head = head
        self._route = route
        self._may_follow = may_follow

    def advance(self, batch: Batch, answer: HiddenState) -> StepResult:
        """In the compute thread. Raises StageError for an answer that is none."""
        outcomes = self._head.step(answer.hidden, batch.entries, self._route.hops[-1].member.node_id)
        seconds = batch.seconds()
        for outcome in outcomes:
            if outcome.tokens and outcome.entry.decodes:
                outcome.entry.session.decoding.speculation.note(outcome.entry.drafts, outcome.accepted, seconds)
        return StepResult(outcomes, seconds, self._follow(outcomes))

    def _follow(self, outcomes: list[Outcome]) -> tuple[Batch, Ticket] | None:
        if not all(map(_goes_on_here, outcomes)) or not self._may_follow(len(outcomes)):
            return None
        batch = Batch([_next_entry(outcome) for outcome in outcomes])
        hop = self._route.hops[0].number
        ticket = self._route.submit_now(batch.message(hop, self._head.embed(batch.tokens)))
        return (batch, ticket) if ticket is not None else None


def _goes_on_here(outcome: Outcome) -> bool:
    session, place = outcome.entry.session, outcome.entry.place
    if not outcome.goes_on or session.is_over or session.is_ahead or place.moving:
        return False
    return outcome.cached < place.reserved


def _next_entry(outcome: Outcome) -> Entry:
    entry = outcome.entry
    return decode_entry(entry.session, entry.place, outcome.cached, outcome.tokens[-1])
