"""The one bridge between the two event loops: asyncio, which serves HTTP, and trio, where the engine lives.

Both run in one process, each in a thread of its own. A crossing is a trio task, in the bridge's nursery, that an
asyncio task started and waits for; when the asyncio side leaves, for whatever reason, the trio task is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import trio
from litestar.types import Receive

from core.errors import sole_error
from core.gateway.errors import ReaderStalled, ShuttingDown
from core.gateway.settings import PATIENCE

WINDOW = 32
"""How many items a producer may be ahead of its reader."""

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", bound=AsyncIterable[Any])


class Bridge:
    """Made in trio; its methods are called in asyncio. `nursery` owns what crosses: cancel it to end all of it."""

    def __init__(self, nursery: trio.Nursery, *, window: int = WINDOW, patience: float = PATIENCE) -> None:
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._window = window
        self._patience = patience

    async def call(self, function: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`, sync or async, in trio: its result, or its exception."""

        async def work(deliver: Callable[[Any], None]) -> None:
            result = function(*args, **kwargs)
            deliver(await result if inspect.isawaitable(result) else result)

        async with self._running(work) as inbox:
            return cast(T, await inbox.get())

    @asynccontextmanager
    async def open(
        self, factory: Callable[P, AbstractAsyncContextManager[V]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[Crossing[V]]:
        """Enters the context manager `factory(*args)` in trio, and iterates over what it gives.

        Raises what entering raises. The producer is held back when it is a window ahead of its reader, and gets
        ReaderStalled when that lasts.
        """
        credit = trio.Semaphore(self._window)

        async def work(deliver: Callable[[Any], None]) -> None:
            async with factory(*args, **kwargs) as value, closing(aiter(value)) as items:
                deliver(value)
                async for item in items:
                    await self._spend(credit)
                    deliver(item)

        async with self._running(work) as inbox:
            yield Crossing(await inbox.get(), inbox, lambda: self._token.run_sync_soon(credit.release))

    async def _spend(self, credit: trio.Semaphore) -> None:
        try:
            with trio.fail_after(self._patience):
                await credit.acquire()
        except trio.TooSlowError as error:
            told = f"nothing was read for {self._patience:g} seconds"
            raise ReaderStalled("the client does not read its stream", told) from error

    @asynccontextmanager
    async def _running(self, work: Callable[[Callable[[Any], None]], Awaitable[None]]) -> AsyncIterator[_Inbox]:
        inbox = _Inbox()
        scope = trio.CancelScope()

        async def run() -> None:
            end: BaseException = ShuttingDown("the server is shutting down", hint="send the request again later")
            try:
                with scope:
                    await work(inbox.deliver)
                end = StopAsyncIteration()
            except Exception as error:
                end = sole_error(error)
            finally:
                inbox.deliver(_End(end))

        self._token.run_sync_soon(self._nursery.start_soon, run)
        try:
            yield inbox
        finally:
            self._token.run_sync_soon(scope.cancel)


class Crossing(Generic[V]):
    """The asyncio end of a context manager that is open in trio: `value` is what entering it gave."""

    def __init__(self, value: V, inbox: _Inbox, on_read: Callable[[], None]) -> None:
        self.value = value
        self._inbox = inbox
        self._on_read = on_read

    def __aiter__(self) -> Crossing[V]:
        return self

    async def __anext__(self) -> Any:
        item = await self._inbox.get()
        self._on_read()
        return item


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or until the client of the request behind `receive` has gone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException


class _Inbox:
    """What a trio task delivers to the asyncio task that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._things: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(self, thing: Any) -> None:
        with suppress(RuntimeError):  # the loop, and with it whoever waited, has ended
            self._loop.call_soon_threadsafe(self._things.put_nowait, thing)

    async def get(self) -> Any:
        thing = await self._things.get()
        if isinstance(thing, _End):
            raise thing.error
        return thing


async def with_silences(items: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """`items`, and None each time that none has come for so long. The wait for the next one goes on behind it."""
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(items))
            while not (await asyncio.wait((coming,), timeout=seconds))[0]:
                yield None
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """`items`, which end with the block where they come from a generator."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
