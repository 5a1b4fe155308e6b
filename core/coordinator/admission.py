"""Who runs on a route: a session is let in when every hop has KV memory for it, the clients in turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import trio

from core.coordinator.kv_budget import Kept, KVBudget
from core.coordinator.route import Route
from core.coordinator.session import Place, Session
from core.coordinator.waiting_queue import WaitingQueue
from core.errors import CoreError, RequestError, RouteError
from core.protocol.messages import ClearCache, CopyCache
from core.runtime.cuts import Cuts
from core.runtime.layer_cache import capacity, longest_within

STARVED_SECONDS = 120.0
"""For how long a session waits for memory that nobody else on its route can free."""
SAME_CHAT = 64
"""Tokens: caches that go on longer than this behind a common beginning are copied from, not taken over."""


class Admission:
    """Lets sessions of `queue` onto `route`, and out; meanwhile their reservation grows with what they decode.

    What it has the hops do with caches it notes as commands, which go out before the next batch does. `begin` gets each
    session that is let in; `left` is called when one has left.
    """

    def __init__(
        self,
        route: Route,
        queue: WaitingQueue,
        begin: Callable[[Session], None],
        left: Callable[[], None],
        *,
        max_sessions: int,
        answer_tokens: int,
        keeps: bool,
        shares: bool = False,
        cuts: Cuts,
    ) -> None:
        """`answer_tokens` are reserved at a time for an answer whose length nobody has bounded.

        `keeps`: ended sessions' caches stay for prompts that begin alike, of the same client unless it `shares` them
        among all. `cuts` says how far back they can be cut.
        """
        self.running: dict[int, Session] = {}
        self.budget = KVBudget(route, keeps=keeps)
        self.is_open = True
        self._route = route
        self._epoch = route.epoch
        self._hop = route.hops[0].number
        self._queue = queue
        self._begin = begin
        self._left = left
        self._max_sessions = max_sessions
        self._answer_tokens = answer_tokens
        self._shares = shares
        self.cuts = cuts
        self._starved: list[Session] = []
        self._commands: list[ClearCache | CopyCache] = []

    def close(self) -> None:
        """Nobody is let in from now on, and what ended sessions left is freed."""
        self.is_open = False
        self._clear(self.budget.forget())

    def any_decodes(self) -> bool:
        return any(session.decodes for session in self.running.values())

    def has_room(self, session: Session) -> bool:
        """Whether its next rows fit into what it has reserved, or can. If not it waits, and is begun again."""
        place = _place_of(session)
        if len(session.tokens) <= place.reserved or self._grow(session, place):
            return True
        if len(self.running) == 1:
            self._preempt(session, STARVED_SECONDS)
        elif session is next(iter(self.running.values())):
            self._starved.append(session)
        else:
            self._preempt(session)
        return False

    def leave(self, session: Session) -> None:
        """It is over, and nothing of it is in flight: its caches are kept for others, or freed."""
        place = self._give_up(session)
        if place is not None:
            kept = [] if session.failure else session.tokens[: place.cached]
            room = capacity(max(place.most_cached, len(kept)))
            self._clear(self.budget.keep(place.cache, kept, room, self._owner(session), place.snapshot))
            session.vacate()
        self._left()

    def move_out(self, session: Session) -> None:
        """It goes on elsewhere, and nothing of it is in flight: its caches are freed."""
        place = self._give_up(session)
        if place is not None:
            self._clear([place.cache])
        self._left()

    def admit(self) -> None:
        """Lets in whoever is next while there is room. Nobody overtakes who waits for more room.

        Those who run here already get it also when nobody else is let in.
        """
        if self._route.failure is not None:
            return
        while self._starved:
            session = self._starved[0]
            if not self._grow(session, _place_of(session)):
                if len(self.running) == 1:
                    self._preempt(session, STARVED_SECONDS)
                return
            self._begin(self._starved.pop(0))
        while self.is_open and len(self.running) < self._max_sessions:
            clients = Counter(session.client for session in self.running.values())
            next_session = self._queue.next(clients)
            if next_session is None or not self._try(next_session):
                return

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    async def send_commands(self, route: Route) -> None:
        """Has the hops do what was noted since, in order."""
        while self._commands:
            await route.command(self._commands.pop(0))

    def _try(self, session: Session) -> bool:
        """Whether `session` need not wait: it is let in, or can't be served by this route at all."""
        longest, decoding = longest_within(self._route.kv_capacity), session.decoding
        if session.prompt_tokens + decoding.max_tokens > longest:
            if not self._route.is_settled:
                return False
            if decoding.bounded or len(session.tokens) >= longest:
                self._queue.remove(session)
                session.fail(_too_long(session, longest))
                return True
            decoding.max_tokens = longest - session.prompt_tokens
        place = self._reserve(session)
        if place is None:
            return False
        self._queue.remove(session)
        self.running[session.number] = session
        session.admit(place)
        self._begin(session)
        return True

    def _wanted(self, session: Session) -> int:
        """What it reserves: all that it may hold if that was bounded, or the next part of it."""
        bound = session.prompt_tokens + session.decoding.max_tokens
        if not session.decoding.bounded:
            bound = min(bound, len(session.tokens) + self._answer_tokens)
        return capacity(bound)

    def _grow(self, session: Session, place: Place) -> bool:
        """Reserves the next part of what it may hold; False if there is no room for that."""
        wanted = self._wanted(session)
        gone = self.budget.reserve(wanted, held=place.reserved)
        if gone is None:
            return False
        place.reserved = wanted
        self._clear(gone)
        return True

    def _reserve(self, session: Session) -> Place | None:
        wanted = self._wanted(session)
        if not self.budget.has_room(wanted):
            return None
        kept, common = self._longest_prefix(session)
        if kept is not None and common < len(kept.tokens) - SAME_CHAT:
            gone = self.budget.reserve(wanted, spared=kept)
            if gone is not None:
                self.budget.touch(kept)
                self._clear(gone)
                self._commands.append(CopyCache(self._hop, kept.cache, session.number, common))
                return Place(self._epoch, session.number, wanted, cached=common, snapshot=kept.snapshot)
        if kept is not None:
            room = max(wanted, kept.room)
            gone = self.budget.reserve(room, taken=kept)
            if gone is not None:
                self._clear(gone)
                return Place(
                    self._epoch, kept.cache, room, cached=common, most_cached=kept.room, snapshot=kept.snapshot
                )
        gone = self.budget.reserve(wanted)
        if gone is None:
            return None
        self._clear(gone)
        return Place(self._epoch, session.number, wanted)

    def _longest_prefix(self, session: Session) -> tuple[Kept | None, int]:
        """The caches to begin with, and how many of their tokens: the last token of a prompt is always run."""
        if session.wants_prompt_logprobs:
            return None, 0
        return self.budget.longest_prefix(session.tokens[:-1], self._owner(session), self.cuts)

    def _owner(self, session: Session) -> str:
        return "" if self._shares else session.client

    def is_starved(self, session: Session) -> bool:
        return session in self._starved

    def _preempt(self, session: Session, patience: float = math.inf) -> None:
        """Its caches make room for those who came before it; it is let in again first, and prefills all it has.

        One before whom nobody came has `patience` seconds: the route's memory has shrunk, and may grow again.
        """
        place = self._give_up(session)
        assert place is not None, "it runs here"
        self._clear([place.cache])
        session.wait()
        self._queue.add(session, trio.current_time() + patience if patience < math.inf else session.deadline)
        if self.running:
            self.admit()
        else:
            self._left()

    def _give_up(self, session: Session) -> Place | None:
        """What it had reserved here, which is free again."""
        if session in self._starved:
            self._starved.remove(session)
        if self.running.pop(session.number, None) is None:
            return None
        place = _place_of(session)
        self.budget.release(place.reserved)
        return place

    def _clear(self, caches: list[int]) -> None:
        if caches:
            self._commands.append(ClearCache(self._hop, caches))


def _place_of(session: Session) -> Place:
    assert session.place is not None, "it runs here"
    return session.place


def context_exceeded(context: int, prompt: int, wanted: int) -> RequestError:
    """Of a request whose prompt and completion are to have more tokens together than there is room for."""
    return RequestError(
        f"This model's maximum context length is {context} tokens",
        f"the request is {prompt + wanted} tokens: {prompt} in the prompt, {wanted} for the completion",
        "shorten either",
        param="prompt",
        code="context_length_exceeded",
    )


def _too_long(session: Session, longest: int) -> CoreError:
    wanted = session.decoding.max_tokens
    if not session.has_run:
        return context_exceeded(longest, session.prompt_tokens, wanted)
    return RouteError(
        "the machines that are left have too little KV memory for this generation",
        f"it may grow to {session.prompt_tokens + wanted} tokens, and they hold {longest}",
        "ask for fewer tokens, or let more machines join",
    )
