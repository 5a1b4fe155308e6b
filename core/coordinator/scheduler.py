"""Continuous batching over a pipeline: as many batches in flight as there are stages, each of whoever is ready.

Every lane passes one batch at a time through the route. A session that has decoded a token joins the next batch that
leaves (iteration-level scheduling: Yu et al., Orca, OSDI 2022); prompts go in chunks between the decode steps of
others, one after another as they came (chunked prefill: Agrawal et al., arXiv:2403.02310).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from core.coordinator.admission import Admission
from core.coordinator.batch import Batch, Entry, Outcome, decode_entry, prefill_entry
from core.coordinator.chunk_sizing import ChunkSizing
from core.coordinator.fast_path import Steps
from core.coordinator.head import HEAD_FAILED, Head
from core.coordinator.route import Route
from core.coordinator.session import Place, Session
from core.coordinator.telemetry import Telemetry
from core.errors import CoreError, NoKVRoom, RouteError, StageError, WrongAnswer
from core.interfaces.engine import Delta
from core.runtime.compute import ComputeThread, explained

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Scheduler:
    """Runs the sessions that `admission` lets onto `route`. `telemetry` hears of it.

    `on_idle` gets a session that is to move on to another route, once nothing of it is in flight.
    """

    def __init__(
        self,
        route: Route,
        head: Head,
        compute: ComputeThread,
        admission: Admission,
        chunk_sizing: ChunkSizing,
        telemetry: Telemetry,
        on_idle: Callable[[Session], None],
    ) -> None:
        self._route = route
        self._head = head
        self._compute = compute
        self._admission = admission
        self._telemetry = telemetry
        self._on_idle = on_idle
        self._steps = Steps(head, route, self._may_follow)
        self._chunk_sizing = chunk_sizing
        self._ready: deque[Session] = deque()
        self._prefilling: deque[Session] = deque()
        self._idle_lanes = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Returns when the route has broken, and all that the compute thread took from it is applied."""
        async with trio.open_nursery() as nursery:
            for _ in self._route.hops:
                nursery.start_soon(self._lane)
            await self._route.broken.wait()
            self.wake()

    def begin(self, session: Session) -> None:
        """It was let in."""
        session.on_read = partial(self._enqueue, session)
        self._enqueue(session)

    def wake(self) -> None:
        """Something has changed for lanes that have nothing to do: cache commands are to be sent, the route broke."""
        self._idle_lanes.unpark_all()

    def release(self, session: Session) -> None:
        """Whoever is over, or moves on, leaves the route as soon as nothing of it is in flight."""
        place = session.place
        if place is None or place.in_flight:
            return
        if session.is_over:
            self._admission.leave(session)
        elif place.moving:
            self._on_idle(session)

    def _enqueue(self, session: Session, *, first: bool = False) -> None:
        """Into the next batch that has room for it, unless its reader has to catch up: that enqueues it again."""
        place = self._place_of(session)
        if place is None or session.is_over or place.busy or place.queued or place.invalidated or place.moving:
            return
        if session.is_ahead:
            return
        place.queued = True
        queue = self._ready if session.decodes else self._prefilling
        queue.insert(0 if first else len(queue), session)
        self._idle_lanes.unpark()

    async def _lane(self) -> None:
        while self._route.failure is None:
            await self._admission.send_commands(self._route)
            batch = self._compose()
            if batch is None:
                if self._route.failure is None and not self._admission.has_commands:  # both may have come meanwhile
                    await self._idle_lanes.park()
                continue
            try:
                await self._pass(batch)
            except RouteError:
                return

    async def _pass(self, batch: Batch) -> None:
        """A batch, and whatever the compute thread has follow it. Raises RouteError if the route breaks."""
        route = self._route
        try:
            hidden = await explained(self._compute.start(self._head.embed, batch.tokens), HEAD_FAILED, _head_failed)
            await self._admission.send_commands(route)
            ticket = await route.submit(batch.message(route.hops[0].number, hidden))
            self._submitted(batch)
            while True:
                step = self._compute.job(partial(self._steps.advance, batch), ticket.done)
                answer = await route.answer(ticket, begin=step.start)
                self._chunk_sizing.note(len(batch.tokens), batch.decodes, answer.compute_us)
                self._telemetry.passed(route, batch, answer, ticket.seconds)
                result = await explained(step, HEAD_FAILED, _head_failed)
                if batch.decodes and len(batch.tokens) == 1 == len(self._admission.running):
                    self._telemetry.stepped(route, result.seconds, ticket.seconds)
                self._apply(result.outcomes, goes_on=result.following is not None)
                if result.following is None:
                    return
                batch, ticket = result.following
                self._account(batch.entries)
        except RouteError:
            raise
        except CoreError as error:
            self._failed(batch, error)

    def _compose(self) -> Batch | None:
        """Decode steps first, an equal share for every lane; then as much of a prompt as does not keep them long."""
        entries: list[Entry] = []
        share = self._share()
        while len(entries) < share and (session := self._next(self._ready, entries)):
            if self._admission.has_room(session):
                place = session.place
                assert place is not None
                entries.append(decode_entry(session, place, place.cached, session.tokens[-1]))
        rows = self._chunk_sizing.chunk_rows(others_decode=self._admission.any_decodes())
        while rows > 0 and (session := self._next(self._prefilling, entries)):
            if self._admission.has_room(session):
                assert session.place is not None
                entries.append(prefill_entry(session, session.place, rows, self._admission.cuts))
                rows -= len(entries[-1].tokens)
        for entry in entries:
            entry.place.busy = True
            entry.place.in_flight += 1
        self._account(entries)
        return Batch(entries) if entries else None

    def _share(self) -> int:
        return -(-max(1, len(self._admission.running)) // len(self._route.hops))

    def _may_follow(self, sessions: int) -> bool:
        """Asked in the compute thread (core.coordinator.fast_path)."""
        others = self._ready or self._prefilling or self._admission.has_commands
        return not others and sessions <= self._share()

    def _next(self, queue: deque[Session], others: list[Entry]) -> Session | None:
        """The next session that goes into a batch with `others`, if any does."""
        while queue:
            session = queue[0]
            place = self._place_of(session)
            alone = place is not None and place.isolated
            if others and (alone or others[0].place.isolated):
                return None
            queue.popleft()
            if place is None:
                continue
            place.queued = False
            if place.moving:
                self.release(session)
            elif not session.is_over and not place.invalidated:
                return session
        return None

    def _place_of(self, session: Session) -> Place | None:
        """Its place on this route: one that moved on while it was queued here may have one on another by now."""
        place = session.place
        return place if place is not None and place.epoch == self._route.epoch else None

    def _account(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            place, end = entry.place, entry.start + len(entry.tokens)
            place.most_cached = max(place.most_cached, end)
            if self._admission.cuts.is_snapshot(len(entry.tokens), end):
                place.snapshot = end
            elif entry.start < place.snapshot:
                place.snapshot = 0

    def _submitted(self, batch: Batch) -> None:
        """A prompt's next chunk need not wait for this one's answer."""
        for entry in batch.entries:
            session, place = entry.session, entry.place
            if not entry.is_last and not session.wants_prompt_logprobs:
                if not place.invalidated:
                    place.cached = entry.end
                self._telemetry.tell(session)
                place.busy = False
                self._enqueue(session, first=True)

    def _apply(self, outcomes: list[Outcome], *, goes_on: bool) -> None:
        """Commits what a step has brought. If the batch goes on, its sessions stay busy and in flight."""
        for outcome in outcomes:
            session, entry, place = outcome.entry.session, outcome.entry, outcome.entry.place
            place.isolated = False
            if outcome.prompt_logprobs:
                session.take_prompt_logprobs(entry.start, outcome.prompt_logprobs)
            if outcome.error is None and entry.outputs:
                place.cached = outcome.cached
            if outcome.tokens and not session.is_over:
                told = session.decoded + len(outcome.tokens)
                stop = session.decoding.text.stop if outcome.finish else ""
                session.commit(outcome.tokens, Delta(outcome.text, told, outcome.finish, tuple(outcome.logprobs), stop))
                self._telemetry.decoded(session, len(outcome.tokens))
            if outcome.error is not None:
                session.fail(outcome.error)
                self._route.is_doubted = True
            elif entry.is_last and session.decoding.max_tokens == 0:
                session.commit((), Delta("", 0, "length"))
            if not goes_on:
                self._settle(entry, decided=entry.outputs > 0)

    def _settle(self, entry: Entry, *, decided: bool) -> None:
        session, place = entry.session, entry.place
        place.in_flight -= 1
        place.invalidated = place.invalidated and place.in_flight > 0
        if decided:
            place.busy = False
        self.release(session)
        self._enqueue(session)

    def _failed(self, batch: Batch, error: CoreError) -> None:
        """A session that a stage failed along with others is tried once more alone, then once more from its start. One
        that failed from its start on is over, but for failures that say nothing of it: those end the route."""
        if isinstance(error, WrongAnswer):
            self._route.on_wrong_answer(error)
            if self._route.failure is not None:
                return  # its sessions go on elsewhere
        by_stage = isinstance(error, StageError) and error.node
        for entry in batch.entries:
            session, place = entry.session, entry.place
            if by_stage and (place.invalidated or len(batch.entries) > 1):
                place.cached = min(place.cached, entry.start)
            elif by_stage and (entry.start > 0 or isinstance(error, WrongAnswer | NoKVRoom)) and not place.retried:
                session.prefill_again()
                place.retried = True
            elif isinstance(error, NoKVRoom):
                # It has room for all that was let in: it lied, or somebody else fills it. A new route has fresh caches.
                said = f"node {error.node!r} refuses what it said it has room for"
                self._route.fail(RouteError(said, error.message, node=error.node))
                return
            else:
                place.cached = 0
                session.fail(error)
                self._route.is_doubted = True
            place.isolated = place.invalidated = True
            self._settle(entry, decided=True)


def _head_failed(error: BaseException) -> StageError:
    return StageError(HEAD_FAILED, f"{type(error).__name__}: {error}")
