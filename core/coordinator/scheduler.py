"""Continuous batching over a pipeline: as many batches under way as there are stages, each of whoever is ready.

Every lane passes one batch at a time through the route. A session that has decoded a token joins the next batch that
leaves (iteration-level scheduling: Yu et al., Orca, OSDI 2022); prompts go in chunks between the decode steps of
others, one after another as they came (chunked prefill: Agrawal et al., arXiv:2403.02310).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from core.coordinator.admission import Admission
from core.coordinator.batch import Batch, Entry, Outcome, decode_entry, prefill_entry
from core.coordinator.head import Head
from core.coordinator.pace import Pace
from core.coordinator.route import Route, Ticket
from core.coordinator.session import Session
from core.coordinator.telemetry import Telemetry
from core.errors import CoreError, RouteError, StageError
from core.interfaces.engine import Delta
from core.protocol.messages import HiddenState
from core.runtime.compute import ComputeThread, Job

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a batch brought, and its sessions' next one, where the compute thread has sent that on its way already."""

    outcomes: list[Outcome]
    following: tuple[Batch, Ticket] | None


class Scheduler:
    """Runs the sessions that `admission` lets in, on the route that it serves. `telemetry` hears of it."""

    def __init__(self, head: Head, compute: ComputeThread, admission: Admission, telemetry: Telemetry) -> None:
        self.admission = admission
        self._head = head
        self._compute = compute
        self._telemetry = telemetry
        self._pace = Pace()
        self._ready: deque[Session] = deque()
        self._prefilling: deque[Session] = deque()
        self._idle_lanes = trio.lowlevel.ParkingLot()
        self._lanes = 1

    async def serve(self, route: Route) -> None:
        """Until the route breaks; the sessions that are on it fail with it then."""
        self._lanes = len(route.hops)
        self._telemetry.route_began(route)
        self.admission.open(route, self._begin)
        try:
            async with trio.open_nursery() as nursery:
                for _ in route.hops:
                    nursery.start_soon(self._lane, route)
                await route.broken.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._ready.clear()
            self._prefilling.clear()
            self.admission.close(route.failure)

    def leave(self, session: Session, ending: str) -> None:
        """Its reader has gone, or has all: what it holds is freed as soon as nothing of it is under way.

        `ending` says why, where it has not ended by itself.
        """
        session.leave(ending)
        self._telemetry.left(session)
        self._free_if_over(session)
        self._idle_lanes.unpark()

    def _begin(self, session: Session) -> None:
        session.on_read = lambda: self._enqueue(session)
        self._enqueue(session)

    def _enqueue(self, session: Session, *, first: bool = False) -> None:
        """Into the next batch that has room for it, unless its reader has to catch up: that enqueues it again."""
        if session.over or session.busy or session.queued or session.void or session.is_ahead:
            return
        session.queued = True
        queue = self._ready if session.answered else self._prefilling
        queue.insert(0 if first else len(queue), session)
        self._idle_lanes.unpark()

    async def _lane(self, route: Route) -> None:
        while True:
            await self.admission.send_orders(route)
            batch = self._compose()
            if batch is None:
                await self._idle_lanes.park()
                continue
            try:
                await self._pass(route, batch)
            except RouteError:
                return

    async def _pass(self, route: Route, batch: Batch) -> None:
        """A batch, and whatever the compute thread has follow it. Raises RouteError where the route breaks."""
        try:
            hidden = await self._explained(self._compute.start(self._head.embed, batch.tokens))
            await self.admission.send_orders(route)
            ticket = await route.submit(batch.message(route.epoch, hidden))
            self._submitted(batch)
            while True:
                advancing = self._compute.job(partial(self._advance, route, batch), ticket.done)
                answer = await route.answer(ticket, begin=advancing.start)
                self._pace.note(len(batch.tokens), batch.decodes, answer.compute_us)
                self._telemetry.passed(batch, answer, ticket.seconds)
                advance = await self._explained(advancing)
                self._deliver(advance.outcomes, goes_on=advance.following is not None)
                if advance.following is None:
                    return
                batch, ticket = advance.following
        except RouteError:
            raise
        except CoreError as error:
            self._failed(batch, error)

    def _compose(self) -> Batch | None:
        """Decode steps first, an equal share for every lane; then as much of a prompt as does not keep them long."""
        entries: list[Entry] = []
        share = self._share()
        while len(entries) < share and (session := self._next(self._ready, entries)):
            if self.admission.has_room(session):
                entries.append(decode_entry(session))
        rows = self._pace.chunk_rows(others_decode=self.admission.any_decodes())
        while rows > 0 and (session := self._next(self._prefilling, entries)):
            if self.admission.has_room(session):
                entries.append(prefill_entry(session, rows))
                rows -= len(entries[-1].tokens)
        for entry in entries:
            session = entry.session
            session.busy = True
            session.under_way += 1
        return Batch(entries) if entries else None

    def _share(self) -> int:
        return -(-max(1, len(self.admission.running)) // self._lanes)

    def _next(self, queue: deque[Session], others: list[Entry]) -> Session | None:
        """The next session that goes into a batch with `others`, if any does."""
        while queue and not (others and (queue[0].alone or others[0].session.alone)):
            session = queue.popleft()
            session.queued = False
            if not session.over and not session.void:
                return session
        return None

    def _submitted(self, batch: Batch) -> None:
        """A prompt's next chunk need not wait for this one's answer."""
        for entry in batch.entries:
            session = entry.session
            if not entry.is_last and not session.decoding.wants_prompt_logprobs:
                if not session.void:
                    session.cached = entry.end
                self._telemetry.tell(session)
                session.busy = False
                self._enqueue(session, first=True)

    def _advance(self, route: Route, batch: Batch, answer: HiddenState) -> Advance:
        """In the compute thread, which sends the next step on its way itself where nothing else is to be seen to."""
        outcomes = self._head.step(answer.hidden, batch.entries)
        seconds = batch.seconds()
        for outcome in outcomes:
            outcome.apply(seconds)
        return Advance(outcomes, self._follow(route, outcomes))

    def _follow(self, route: Route, outcomes: list[Outcome]) -> tuple[Batch, Ticket] | None:
        sessions = [outcome.entry.session for outcome in outcomes if outcome.goes_on]
        if len(sessions) < len(outcomes) or len(sessions) > self._share():
            return None
        if self._ready or self._prefilling or self.admission.has_orders:
            return None
        if any(session.over or session.is_ahead or len(session.tokens) > session.reserved for session in sessions):
            return None
        batch = Batch([decode_entry(session) for session in sessions])
        ticket = route.submit_now(batch.message(route.epoch, self._head.embed(batch.tokens)))
        return (batch, ticket) if ticket is not None else None

    def _deliver(self, outcomes: list[Outcome], *, goes_on: bool) -> None:
        """Tells the readers. Where the batch goes on, its sessions stay busy and under way."""
        for outcome in outcomes:
            session, entry = outcome.entry.session, outcome.entry
            session.alone = False
            if outcome.tokens and not session.over:
                session.tell(outcome.delta)
                self._telemetry.decoded(session, len(outcome.tokens))
            if outcome.error is not None:
                session.fail(outcome.error)
            if entry.is_last and session.decoding.max_tokens == 0:
                session.tell(Delta("", 0, "length"))
            if not goes_on:
                self._settle(session, decided=entry.outputs > 0)

    def _settle(self, session: Session, *, decided: bool) -> None:
        session.under_way -= 1
        session.void = session.void and session.under_way > 0
        if decided:
            session.busy = False
        self._free_if_over(session)
        self._enqueue(session)

    def _failed(self, batch: Batch, error: CoreError) -> None:
        """A session that a stage failed along with others is tried once more alone, then once more from its start."""
        by_stage = isinstance(error, StageError) and error.node
        for entry in batch.entries:
            session = entry.session
            if session.void or (by_stage and len(batch.entries) > 1):
                session.cached = min(session.cached, entry.start)
            elif by_stage and entry.start > 0 and not session.restarted:
                session.restart()
                session.restarted = True
            else:
                session.cached = 0
                session.fail(error)
            session.alone = session.void = True
            self._settle(session, decided=True)

    def _free_if_over(self, session: Session) -> None:
        if session.over and session.under_way == 0:
            self.admission.leave(session)

    async def _explained(self, job: Job[T]) -> T:
        """The job's result. Torch and plugins may raise anything in it: one batch fails then, not the cluster."""
        try:
            return await job.wait()
        except CoreError:
            raise
        except Exception as error:
            _log.exception("the coordinator's head failed")
            raise StageError("the coordinator's head failed", f"{type(error).__name__}: {error}") from error
