"""A count of changes that tasks can wait on."""

from __future__ import annotations

import trio


class Changes:
    """`count` is how many there have been. Trio's thread alone may touch it."""

    def __init__(self) -> None:
        self.count = 0
        self._next = trio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = trio.Event()

    async def wait(self, since: int) -> None:
        """Until there are more than `since`. May be cut short by a deadline of the caller's."""
        while self.count == since:
            await self._next.wait()
