"""The bridge alone: an asyncio loop in a thread, an engine-like producer in trio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.gateway.bridge import Bridge
from core.gateway.errors import ReaderStalled, ShuttingDown

WINDOW = 4


class Producer:
    """Counts as far as it is let."""

    def __init__(self) -> None:
        self.given = 0
        self.finalised = False
        self.left = trio.Event()

    @asynccontextmanager
    async def open(self, limit: int | None) -> AsyncIterator[AsyncIterator[int]]:
        try:
            yield self._count(limit)
        finally:
            self.left.set()

    async def _count(self, limit: int | None) -> AsyncIterator[int]:
        try:
            while limit is None or self.given < limit:
                self.given += 1
                yield self.given
        finally:
            self.finalised = True


async def in_asyncio(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    async def main() -> Any:
        return await function(*args)

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(lambda: asyncio.run(main()))


@pytest.fixture
def bridge(nursery: trio.Nursery) -> Bridge:
    return Bridge(nursery, window=WINDOW)


async def test_sync_and_async_functions_are_called_in_trio(bridge: Bridge) -> None:
    here = threading.current_thread()

    async def add(a: int, b: int) -> int:
        await trio.lowlevel.checkpoint()
        return a + b

    async def main() -> None:
        assert await bridge.call(threading.current_thread) is here
        assert await bridge.call(add, 1, b=2) == 3

    await in_asyncio(main)


async def test_errors_cross_without_the_groups_around_them(bridge: Bridge) -> None:
    async def fail() -> None:
        async with trio.open_nursery():
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        await in_asyncio(bridge.call, fail)


async def test_items_come_in_order_and_the_end_after_leaving(bridge: Bridge) -> None:
    producer = Producer()

    async def main() -> list[int]:
        async with bridge.open(producer.open, 50) as crossing:
            items = [item async for item in crossing]
            assert producer.left.is_set()
            return items

    assert await in_asyncio(main) == list(range(1, 51))


async def test_a_producer_is_held_back_by_a_slow_reader(bridge: Bridge, nursery: trio.Nursery) -> None:
    producer = Producer()
    proceed = threading.Event()
    counts: list[int] = []

    async def main() -> None:
        async with bridge.open(producer.open, None) as crossing:
            for _ in range(3):
                await asyncio.to_thread(proceed.wait)
                proceed.clear()
                await anext(crossing)

    nursery.start_soon(in_asyncio, main)
    with trio.fail_after(300):
        for read in range(3):
            while producer.given < read + WINDOW + 1:
                await wait_all_tasks_blocked(0.01)
            await wait_all_tasks_blocked(0.01)
            counts.append(producer.given)
            proceed.set()
        await producer.left.wait()
    assert counts == [WINDOW + 1, WINDOW + 2, WINDOW + 3]


async def test_leaving_early_closes_the_producer(bridge: Bridge) -> None:
    producer = Producer()

    async def main() -> None:
        async with bridge.open(producer.open, None) as crossing:
            await anext(crossing)

    await in_asyncio(main)
    with trio.fail_after(300):
        await producer.left.wait()
    assert producer.finalised


async def test_a_reader_that_stalls_for_too_long_loses_the_producer(nursery: trio.Nursery) -> None:
    producer = Producer()
    bridge = Bridge(nursery, window=WINDOW, patience=0.01)

    async def main() -> list[int]:
        items: list[int] = []
        async with bridge.open(producer.open, None) as crossing:
            await bridge.call(producer.left.wait)
            with pytest.raises(ReaderStalled):
                async for item in crossing:
                    items.append(item)
        return items

    assert await in_asyncio(main) == list(range(1, WINDOW + 1))


async def test_a_cancelled_caller_cancels_the_call(bridge: Bridge) -> None:
    started, cancelled = trio.Event(), trio.Event()

    async def wait() -> None:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async def main() -> None:
        calling = asyncio.ensure_future(bridge.call(wait))
        await bridge.call(started.wait)
        calling.cancel()
        await bridge.call(cancelled.wait)

    await in_asyncio(main)
    assert cancelled.is_set()


async def test_what_is_open_when_trio_ends_is_told_so(nursery: trio.Nursery) -> None:
    told = trio.Event()

    async def own_bridge(*, task_status: trio.TaskStatus[tuple[Bridge, trio.CancelScope]]) -> None:
        async with trio.open_nursery() as owner:
            task_status.started((Bridge(owner), owner.cancel_scope))
            await told.wait()

    bridge, scope = await nursery.start(own_bridge)
    producer = Producer()

    async def main() -> None:
        async with bridge.open(producer.open, None) as crossing:
            await Bridge.call(outer, scope.cancel)
            with pytest.raises(ShuttingDown):
                async for _ in crossing:
                    pass

    outer = Bridge(nursery)
    await in_asyncio(main)
    assert producer.left.is_set()
