"""What transports promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from core.errors import sole_error
from core.guard.calls import Call, Guard, as_its_class_has_it, is_excused, shown
from core.interfaces.transport import Channel, Transport

MAX_PORT = 65_535


class _ListeningStatus(trio.TaskStatus[int]):
    """Passes on a port, if it is one."""

    def __init__(self, call: Call, told: trio.TaskStatus[int]) -> None:
        self._call = call
        self._told = told

    def started(self, value: int | None = None) -> None:
        if not isinstance(value, int) or not 0 < value <= MAX_PORT:
            raise self._call.failed(f"told {shown(value)}, and it must tell the port that it listens on")
        self._told.started(value)


def guard_transport(transport: Transport, guard: Guard) -> None:
    listen, dial = as_its_class_has_it(transport, "listen"), as_its_class_has_it(transport, "dial")

    async def watched_listen(
        *args: Any, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED, **options: Any
    ) -> None:
        call = Call(guard.plugin, guard.item, "listen", args[:2], options)
        status = _ListeningStatus(call, task_status)
        try:
            await listen(*args, task_status=status, **options)
        except (Exception, SystemExit) as error:
            raise _told(call, error) from error.__cause__
        raise call.failed("returned, and it must serve until it is cancelled")

    @asynccontextmanager
    async def watched_dial(*args: Any, **options: Any) -> AsyncIterator[Channel]:
        call = Call(guard.plugin, guard.item, "dial", args, options)
        async with AsyncExitStack() as stack:
            yield await _dialled(call, stack, dial, options)

    vars(transport).update(listen=watched_listen, dial=watched_dial)


async def _dialled(
    call: Call, stack: AsyncExitStack, dial: Callable[..., AbstractAsyncContextManager[Channel]], options: Any
) -> Channel:
    try:
        channel: Any = await stack.enter_async_context(dial(*call.args, **options))
    except (Exception, SystemExit) as error:
        raise _told(call, error) from error.__cause__
    if not isinstance(channel, Channel):
        raise call.gave(shown(channel), "a Channel")
    return channel


def _told(call: Call, error: BaseException) -> BaseException:
    """The one that counts of a group, as it is if the interface speaks of it."""
    sole = sole_error(error)
    return sole if is_excused(sole) else call.raised(sole)
