"""Threads for what a request needs before it waits for a route: its prompt in tokens, its grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, cast

import trio

from core.errors import Overloaded

THREADS = 2
"""More would take the cores, and the interpreter, from those that generate."""
MAX_PREPARING = 256
"""Requests, those that wait for a thread included."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Preparation:
    """Each client has one thread at a time: whoever sends a hundred long prompts holds up nobody but itself."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(THREADS)
        self._clients: dict[str, trio.CapacityLimiter] = {}
        self._preparing = 0

    async def run(self, client: str, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """What `work` gives. If its client goes, the thread ends its work by itself, and counts until then.

        Raises Overloaded if too many prepare already.
        """
        if self._preparing >= MAX_PREPARING:
            crowd = f"{MAX_PREPARING} requests wait for their prompts to be turned into tokens"
            raise Overloaded(crowd, "no more are taken at once", "try again shortly")
        self._preparing += 1
        try:
            turn = cast(trio.CapacityLimiter, _Turn(self._one_of(client), self._threads))
            return await trio.to_thread.run_sync(work, *args, abandon_on_cancel=True, limiter=turn)
        finally:
            self._preparing -= 1

    def _one_of(self, client: str) -> trio.CapacityLimiter:
        if client not in self._clients:
            self._clients = {name: own for name, own in self._clients.items() if own.statistics().borrowed_tokens}
            self._clients[client] = trio.CapacityLimiter(1)
        return self._clients[client]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A limiter that takes one of the client's and one of all threads, as trio.to_thread asks for it."""

    own: trio.CapacityLimiter
    all: trio.CapacityLimiter

    async def acquire_on_behalf_of(self, borrower: Any) -> None:
        await self.own.acquire_on_behalf_of(borrower)
        try:
            await self.all.acquire_on_behalf_of(borrower)
        except BaseException:
            self.own.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: Any) -> None:
        self.all.release_on_behalf_of(borrower)
        self.own.release_on_behalf_of(borrower)
