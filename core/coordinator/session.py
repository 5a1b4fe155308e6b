"""A session: one generation, from its prompt to its last token. Its reader takes deltas; the scheduler makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from core.coordinator.decoding import Decoding
from core.coordinator.pace import Clock
from core.errors import CoreError
from core.interfaces.engine import Delta, TokenLogprob

READ_AHEAD = 32
"""Steps that a session may be ahead of its reader."""


class Session:
    """The Generation of core.interfaces.engine.

    `tokens` are the prompt's and those decoded since; the route's caches hold the first `cached` of them, or will
    once the batches have passed that are `under_way`. Whatever is not cached is to be run: a prompt, the last token,
    or all of it again.
    """

    def __init__(self, number: int, prompt: Sequence[int], decoding: Decoding, client: str = "") -> None:
        self.number = number
        self.cache = number
        """Under which the stages keep its KV: its own number, or that of the ended session whose caches it took."""
        self.client = client
        self.tokens = list(prompt)
        self.decoding = decoding
        self.prompt_tokens = len(prompt)
        self.clock = Clock()
        self.epoch = 0
        self.cached_tokens = 0
        self.cached = 0
        self.most_cached = 0
        """Drafts included that did not come true: the caches have memory for so many tokens."""
        self.reserved = 0
        self.arrival = 0
        self.admitted = trio.Event()
        self.under_way = 0
        self.busy = False
        """Whether a batch that is made up or under way decides what it does next."""
        self.queued = False
        self.answered = False
        """Whether a token was decoded on these caches: what comes next are decode steps."""
        self.alone = False
        """Whether a batch failed that it was in with others: the next one is its own."""
        self.void = False
        """Whether a batch failed that it was in: it goes on when nothing is under way that was sent before."""
        self.restarted = False
        """Whether it was begun anew because its caches failed it."""
        self.over = False
        self.ending = ""
        """How it ended: its finish reason, or what else became of it."""
        self.failure: CoreError | None = None
        self.on_read: Callable[[], None] | None = None
        """Called when its reader has caught up."""
        self._unread: deque[Delta | CoreError] = deque()
        self._told = trio.Event()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(self.decoding.prompt_logprobs)

    @property
    def is_ahead(self) -> bool:
        """Whether its reader has to catch up before it goes on."""
        return len(self._unread) >= READ_AHEAD

    def tell(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.over, self.ending = True, delta.finish_reason
        self._unread.append(delta)
        self._told.set()

    def leave(self, ending: str) -> None:
        """Its reader has gone, or has all."""
        self.over, self.ending = True, self.ending or ending

    def fail(self, error: CoreError, ending: str = "failed") -> None:
        """Its reader gets `error` once it has read what came before."""
        if not self.over:
            self.over, self.failure, self.ending = True, error, ending
            self._unread.append(error)
            self._told.set()
            self.admitted.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Whoever is admitted is told something, a failure at least: the route's own deadlines see to it."""
        while True:
            while not self._unread:
                self._told = trio.Event()
                await self._told.wait()
            was_ahead = self.is_ahead
            news = self._unread.popleft()
            if was_ahead and self.on_read is not None:
                self.on_read()
            if isinstance(news, CoreError):
                raise news
            yield news
            if news.finish_reason is not None:
                return

    def restart(self, cached: int = 0) -> None:
        """It goes on from caches that hold so many of its tokens: the others are prefilled."""
        self.cached = cached
        self.answered = self.alone = False
