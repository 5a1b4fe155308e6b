"""The cluster's status as it changes, for whoever watches: worked out once a second, however many do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio

from core.interfaces.engine import Engine

PULSE_SECONDS = 1.0


class Pulse:
    """Lives in trio."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._status = b""
        self._stale_at = 0.0

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[bytes]]:
        yield self._told()

    async def _told(self) -> AsyncIterator[bytes]:
        """The status as JSON: at once, and whenever it is another one."""
        told = b""
        while True:
            status = self._fresh()
            if status != told:
                told = status
                yield status
            await trio.sleep_until(self._stale_at)

    def _fresh(self) -> bytes:
        now = trio.current_time()
        if now >= self._stale_at:
            self._status, self._stale_at = msgspec.json.encode(self._engine.status()), now + PULSE_SECONDS
        return self._status
