"""A transport's mistakes are named, and what passes through it is not taken for one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from core import Transport, hookimpl
from core.errors import ChannelClosed, PluginError
from core.plugins import PluginHost
from core.testing.transport import MemoryTransport


def guarded(cls: type[Transport]) -> Transport:
    host = PluginHost()
    host.register(SimpleNamespace(core_transports=hookimpl(lambda: [cls])), "careless")
    return host.transports.get("memory")


class Listening(MemoryTransport):
    async def listen(self, host: str, port: int, handler: Any, **options: Any) -> None:
        raise OSError("no such network")


class Early(MemoryTransport):
    async def listen(self, host: str, port: int, handler: Any, **options: Any) -> None:
        return


class Vague(MemoryTransport):
    async def listen(self, host: str, port: int, handler: Any, *, credentials: Any = None, task_status: Any) -> None:
        task_status.started("port")


@pytest.mark.parametrize(
    ("careless", "said"),
    [
        (Listening, "raised OSError: no such network"),
        (Early, "returned, and it must serve until it is cancelled"),
        (Vague, "told 'port', and it must tell the port that it listens on"),
    ],
)
async def test_a_transport_that_does_not_listen_is_named(careless: type[MemoryTransport], said: str) -> None:
    transport = guarded(careless)
    with pytest.RaisesGroup(pytest.RaisesExc(PluginError, match=f"listen.*of its transport 'memory' {said}")):
        async with trio.open_nursery() as nursery:
            await nursery.start(transport.listen, "127.0.0.1", 0, None)


async def test_a_transport_that_dials_oddly_is_named_and_what_the_block_raises_is_not_its() -> None:
    class Odd(MemoryTransport):
        @asynccontextmanager
        async def dial(self, host: str, port: int, *, timeout: float, pin: bytes | None = None) -> Any:
            if port == 1:
                raise OSError("no route")
            if port == 2:
                raise ChannelClosed("nobody there")
            yield None

    transport = guarded(Odd)
    for port, said in ((1, "raised OSError: no route"), (3, "gave None, and it must give a Channel")):
        with pytest.raises(PluginError, match=said):
            async with transport.dial("host", port, timeout=1):
                pytest.fail("it was dialled")
    with pytest.raises(ChannelClosed, match="nobody there"):
        async with transport.dial("host", 2, timeout=1):
            pytest.fail("it was dialled")


async def test_a_careful_transport_is_left_in_peace() -> None:
    transport = guarded(MemoryTransport)

    async def echo(channel: Any) -> None:
        await channel.send(await channel.receive())

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(transport.listen, "127.0.0.1", 0, echo)
            with pytest.raises(LookupError):
                async with transport.dial("127.0.0.1", port, timeout=30) as channel:
                    await channel.send(b"hello")
                    assert await channel.receive() == b"hello"
                    raise LookupError
            nursery.cancel_scope.cancel()
