"""A session: one generation, from its prompt to its last token. It belongs to trio; its reader takes deltas."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import trio

from core.coordinator.chunk_sizing import Clock
from core.coordinator.decoding import Decoding
from core.errors import CoreError, RouteError
from core.interfaces.engine import Delta, TokenLogprob

READ_AHEAD = 32
"""Steps that a session may be ahead of its reader."""


class Status(Enum):
    """Where a session is on its way. `Session` alone moves it."""

    WAITING = "waiting"
    """It holds nothing on any route."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SUSPENDED = "suspended"
    """Its route ended under it. It holds nothing, and goes on from its tokens on the next route."""
    ENDED = "ended"


_MOVES = {
    Status.WAITING: {Status.PREFILLING, Status.ENDED},
    Status.PREFILLING: {Status.DECODING, Status.WAITING, Status.SUSPENDED, Status.ENDED},
    Status.DECODING: {Status.PREFILLING, Status.WAITING, Status.SUSPENDED, Status.ENDED},
    Status.SUSPENDED: {Status.PREFILLING, Status.ENDED},
    Status.ENDED: set[Status](),
}


@dataclass(slots=True, eq=False)
class Place:
    """What a session has on one route. It ends with the route, or when the session leaves it.

    The route's caches hold the first `cached` of the session's tokens, or will once the batches have passed that are
    `in_flight`. Whatever is not cached is to be run: a prompt, the last token, or all of it again.
    """

    epoch: int
    cache: int
    """Under which the stages keep its KV: its own number, or that of the ended session whose caches it took."""
    reserved: int
    """Tokens of the route's KV memory."""
    cached: int = 0
    most_cached: int = 0
    """Drafts included that did not come true: the caches have memory for so many tokens."""
    snapshot: int = 0
    """Behind so many tokens the last snapshot was taken, of layers that can't forget a token."""
    in_flight: int = 0
    busy: bool = False
    """Whether a batch that is composed or in flight decides what the session does next."""
    queued: bool = False
    isolated: bool = False
    """Whether a batch failed that it was in with others: the next one is its own."""
    invalidated: bool = False
    """Whether a batch failed that it was in: it goes on when nothing is in flight that was sent before."""
    retried: bool = False
    """Whether it was prefilled once more because its caches failed it."""
    moving: bool = False
    """Whether it goes on elsewhere as soon as nothing of it is in flight."""


class Session:
    """The Generation of core.interfaces.engine.

    `tokens` are the prompt's and those decoded since: a token is in them, in the text that its reader is told and in
    all counts from the same moment on (`commit`).
    """

    def __init__(self, number: int, prompt: Sequence[int], decoding: Decoding, client: str = "") -> None:
        self.number = number
        self.client = client
        self.tokens = list(prompt)
        self.decoding = decoding
        self.prompt_tokens = len(prompt)
        self.clock = Clock()
        self.status = Status.WAITING
        self.place: Place | None = None
        self.arrival = 0
        """Its place in the order in which sessions came."""
        self.cached_tokens = 0
        self.has_run = False
        """Whether it was ever let onto a route."""
        self.admitted = trio.Event()
        """Set when it is let onto a route for the first time, or ends before."""
        self.deadline = math.inf
        """By trio's clock, for one that waits or is suspended: then it fails."""
        self.lost: RouteError | None = None
        """Why its last route broke."""
        self.lost_routes = 0
        self.recoveries = 0
        self.outage = 0.0
        """Seconds for which its last recovery took it off the routes."""
        self.ending = ""
        """How it ended: its finish reason, or what else became of it."""
        self.failure: CoreError | None = None
        self.on_read: Callable[[], None] | None = None
        """Called when its reader has caught up."""
        self._suspended_at = 0.0
        self._prefilled = 0
        self._prompt_logprobs: list[TokenLogprob] = []
        self._unread: deque[Delta | CoreError] = deque()
        self._news = trio.Event()

    @property
    def is_over(self) -> bool:
        return self.status is Status.ENDED

    @property
    def decodes(self) -> bool:
        """Whether a token was decoded on its present caches: what comes next are decode steps."""
        return self.status is Status.DECODING

    @property
    def decoded(self) -> int:
        """Tokens of its completion so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilled(self) -> int:
        """Tokens of its prompt that are, or were, in a route's caches."""
        return min(self.place.cached if self.place is not None else self._prefilled, self.prompt_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the first token is decoded: all rows of the prompt are wanted back."""
        return self.decoding.prompt_logprobs_asked is not None and self.decoded == 0

    @property
    def waits_for(self) -> str:
        """Why it is suspended; empty while it runs. Any thread may ask."""
        lost = self.lost
        return f"{lost.title}: {lost.reason}" if lost is not None and self.status is Status.SUSPENDED else ""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(self._prompt_logprobs)

    @property
    def is_ahead(self) -> bool:
        """Whether its reader has to catch up before it goes on."""
        return len(self._unread) >= READ_AHEAD

    def admit(self, place: Place) -> None:
        """It begins on a route, with the first `place.cached` tokens found there."""
        if not self.has_run:
            self.cached_tokens, self.has_run = place.cached, True
            self.admitted.set()
        elif self.status is Status.SUSPENDED and self.lost is not None:
            self.recoveries += 1
            self.outage = time.monotonic() - self._suspended_at
        self.place, self.deadline, self.lost = place, math.inf, None
        self._become(Status.PREFILLING)

    def prefill_again(self) -> None:
        """Its caches hold nothing of use: all its tokens are run once more."""
        if self.place is not None:
            self.place.cached = 0
            self.place.isolated = False
        if self.status is Status.DECODING:
            self._become(Status.PREFILLING)

    def commit(self, tokens: Sequence[int], delta: Delta | None) -> None:
        """Takes what a step has brought: the tokens, and what its reader is told of them."""
        if self.is_over:
            return
        self.tokens += tokens
        if tokens and self.status is Status.PREFILLING:
            self._become(Status.DECODING)
        if delta is not None:
            self._unread.append(delta)
            self._news.set()
            if delta.finish_reason is not None:
                self._end(delta.finish_reason)

    def take_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Those of the prompt's tokens that rows from position `start` on have told."""
        if start == 0:
            self._prompt_logprobs.clear()
        self._prompt_logprobs += logprobs

    def vacate(self) -> None:
        """It gives up what it has on its route."""
        if self.place is not None:
            self._prefilled, self.place = self.place.cached, None

    def wait(self) -> None:
        """It gives up its place for others."""
        self.vacate()
        self._become(Status.WAITING)

    def suspend(self, failure: RouteError | None = None) -> None:
        """Its route ended: by `failure`, or (None) because another takes its place."""
        self.vacate()
        self.lost = failure
        self._suspended_at = time.monotonic()
        self._become(Status.SUSPENDED)

    def leave(self, ending: str) -> None:
        """Its reader has gone, or has all."""
        if not self.is_over:
            self._end(ending)

    def fail(self, error: CoreError, ending: str = "failed") -> None:
        """Its reader gets `error` once it has read what came before."""
        if not self.is_over:
            self.failure = error
            self._unread.append(error)
            self._news.set()
            self._end(ending)

    def _end(self, ending: str) -> None:
        self.ending = ending
        self._become(Status.ENDED)
        self.admitted.set()

    def _become(self, status: Status) -> None:
        assert status in _MOVES[self.status], f"session {self.number}: {self.status} -> {status}"
        self.status = status

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Whoever is admitted is told something, a failure at least: routes and the router have deadlines."""
        while True:
            while not self._unread:
                self._news = trio.Event()
                await self._news.wait()
            was_ahead = self.is_ahead
            news = self._unread.popleft()
            if was_ahead and self.on_read is not None:
                self.on_read()
            if isinstance(news, CoreError):
                raise news
            yield news
            if news.finish_reason is not None:
                return
