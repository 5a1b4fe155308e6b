"""Who runs and who waits: a session is let in when every hop has KV memory for it, the clients in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import trio

from core.coordinator.kv_budget import Kept, KVBudget
from core.coordinator.route import Route
from core.coordinator.session import Session
from core.coordinator.telemetry import Telemetry
from core.errors import Overloaded, RouteError
from core.protocol.messages import ClearCache, CopyCache
from core.runtime.kv_cache import capacity

MAX_WAITING = 256
WAIT_SECONDS = 120.0
"""For how long a session waits to be let in."""
ANSWER_TOKENS = 1024
"""Reserved at a time for an answer whose length nobody has bounded."""
SAME_CHAT = 64
"""Tokens: caches that go on longer than this behind a common beginning are copied from, not taken over."""


class Admission:
    """Sessions enter, and leave when they are over; meanwhile their reservation grows with what they decode.

    What it has the hops do with caches it notes as orders, which go out before the next batch does.
    """

    def __init__(self, *, max_sessions: int, keeps: bool, rolls_back: bool, telemetry: Telemetry) -> None:
        """`keeps`: ended sessions' caches stay for prompts that begin alike; `rolls_back` as in ModelSpec."""
        self.running: dict[int, Session] = {}
        self.waiting: list[Session] = []
        self.budget = KVBudget(0, keeps=False)
        self._max_sessions = max_sessions
        self._keeps = keeps
        self._rolls_back = rolls_back
        self._telemetry = telemetry
        self._arrivals: Iterator[int] = itertools.count()
        self._starved: list[Session] = []
        self._orders: list[ClearCache | CopyCache] = []
        self._epoch = 0
        self._begin: Callable[[Session], None] | None = None

    def open(self, route: Route, begin: Callable[[Session], None]) -> None:
        """Lets sessions onto a route: `begin` gets each."""
        self.budget = KVBudget(route.kv_tokens, keeps=self._keeps)
        self._epoch, self._begin = route.epoch, begin

    def close(self, failure: RouteError | None) -> None:
        """The route is gone, and with it all caches: who ran or waited fails."""
        self._begin = None
        self._orders.clear()
        self._starved.clear()
        self.budget = KVBudget(0, keeps=False)
        for session in (*self.running.values(), *self.waiting):
            session.fail((failure or RouteError("the coordinator ends")).again())
        self.running.clear()
        self.waiting.clear()

    async def enter(self, session: Session) -> None:
        """Returns when it runs. Raises Overloaded where too many wait, or it waited too long."""
        self._telemetry.came(session)
        if len(self.waiting) >= MAX_WAITING:
            full = Overloaded(f"{MAX_WAITING} requests are waiting", "no more are taken at once", "try again shortly")
            session.fail(full, "queue_full")
            raise full
        session.arrival = next(self._arrivals)
        self.waiting.append(session)
        self._admit()
        with trio.move_on_after(WAIT_SECONDS):
            await session.admitted.wait()
        if session.failure is not None:
            raise session.failure
        if not session.admitted.is_set():
            self.waiting.remove(session)
            late = Overloaded(f"no room within {WAIT_SECONDS:g} s", f"beside {self.crowd}", "try again later")
            session.fail(late, "queue_timeout")
            raise late

    @property
    def crowd(self) -> str:
        return f"{len(self.running)} running and {len(self.waiting)} waiting"

    def any_decodes(self) -> bool:
        return any(session.answered for session in self.running.values())

    def has_room(self, session: Session) -> bool:
        """Whether its next rows fit into what it has reserved, or now has. If not it waits, and is begun again."""
        if len(session.tokens) <= session.reserved:
            return True
        if self._grow(session):
            return True
        if session is next(iter(self.running.values())):
            self._starved.append(session)
        else:
            self._preempt(session)
        return False

    def leave(self, session: Session) -> None:
        """It is over, and nothing of it is under way: its caches are kept for others, or freed."""
        for waiting in (self.waiting, self._starved):
            if session in waiting:
                waiting.remove(session)
        if self.running.pop(session.number, None) is not None:
            self.budget.release(session.reserved)
            kept = [] if session.failure else session.tokens[: session.cached]
            self._clear(self.budget.keep(session.cache, kept, capacity(max(session.most_cached, len(kept)))))
        self._admit()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    async def send_orders(self, route: Route) -> None:
        """Has the hops do what was noted since, in order."""
        while self._orders:
            await route.order(self._orders.pop(0))

    def _admit(self) -> None:
        """Lets in whoever is next while there is room. Nobody overtakes who waits for more room."""
        if self._begin is None:
            return
        while self._starved:
            if not self._grow(self._starved[0]):
                return
            self._begin(self._starved.pop(0))
        while self.waiting and len(self.running) < self._max_sessions:
            session = self._next()
            if not self._reserve(session):
                return
            self.waiting.remove(session)
            self.running[session.number] = session
            session.admitted.set()
            session.epoch = self._epoch
            self._telemetry.tell(session)
            self._begin(session)

    def _next(self) -> Session:
        """Whoever ran before; or else, of the clients that run least, the one that came first."""
        running = Counter(session.client for session in self.running.values())
        return min(self.waiting, key=lambda one: (not one.admitted.is_set(), running[one.client], one.arrival))

    def _wanted(self, session: Session) -> int:
        """What it reserves: all that it may hold where that was bounded, or the next part of it."""
        bound = session.prompt_tokens + session.decoding.max_tokens
        if not session.decoding.bounded:
            bound = min(bound, len(session.tokens) + ANSWER_TOKENS)
        return capacity(bound)

    def _grow(self, session: Session) -> bool:
        """Reserves the next part of what it may hold; False where there is no room for that."""
        wanted = self._wanted(session) - session.reserved
        gone = self.budget.reserve(wanted)
        if gone is None:
            return False
        session.reserved += wanted
        self._clear(gone)
        return True

    def _reserve(self, session: Session) -> bool:
        wanted = self._wanted(session)
        if not self.budget.has_room(wanted):
            return False
        kept, common = self._alike(session)
        if kept is not None and self._rolls_back and common < len(kept.tokens) - SAME_CHAT:
            gone = self.budget.reserve(wanted, spared=kept)
            if gone is not None:
                self.budget.touch(kept)
                self._let_in(session, wanted, gone, common)
                self._orders.append(CopyCache(self._epoch, kept.cache, session.cache, common))
                return True
        wanted = max(wanted, kept.room if kept else 0)
        gone = self.budget.reserve(wanted, taken=kept)
        if gone is None:
            return False
        if kept is not None:
            session.cache, session.most_cached = kept.cache, kept.room
        self._let_in(session, wanted, gone, common)
        return True

    def _let_in(self, session: Session, reserved: int, gone: list[int], cached: int) -> None:
        self._clear(gone)
        session.reserved = reserved
        session.restart(cached)
        if not session.admitted.is_set():
            session.cached_tokens = cached

    def _alike(self, session: Session) -> tuple[Kept | None, int]:
        """The caches to begin with, and how many of their tokens: the last token of a prompt is always run."""
        if session.decoding.wants_prompt_logprobs:
            return None, 0
        kept, common = self.budget.alike(session.tokens[:-1])
        if kept is not None and not self._rolls_back and common < len(kept.tokens):
            return None, 0
        return kept, common

    def _preempt(self, session: Session) -> None:
        """Its caches make room for those who came before it; it is let in again first, and prefills all it has."""
        del self.running[session.number]
        self.budget.release(session.reserved)
        session.reserved = session.most_cached = 0
        self._clear([session.cache])
        session.restart()
        self.waiting.append(session)
        self._admit()

    def _clear(self, caches: list[int]) -> None:
        if caches:
            self._orders.append(ClearCache(self._epoch, caches))
