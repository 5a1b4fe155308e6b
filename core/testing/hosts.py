"""Machines on one machine, for tests of what passes between them: network namespaces joined by a bridge, and a tap.

Needs Linux, root, and the command `ip`; `can_have_hosts` says whether all is there.

    async with open_hosts(3, delays={2: 0.015}) as network:
        await trio.run_process(network.hosts[0].command("ping", "-c1", network.hosts[1].address))
        assert b"secret" not in network.seen

A host with a delay is on a long cable: a task of the caller's carries its frames, and holds each back for so long.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import trio

_ALL_PROTOCOLS = 3
_NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of sched.h."""
_LARGEST_FRAME = 70_000
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ON_THE_WAY = 4096
"""Frames that a long cable holds, one way; further ones are lost."""


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str
    cable: str
    """The end of its cable that is in the switch."""

    @property
    def namespace(self) -> Path:
        return Path("/run/netns", self.name)

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` there."""
        return ["ip", "netns", "exec", self.name, *words]


def enter(namespace: Path) -> None:
    """Moves this process, which has one thread, to the host of that network namespace."""
    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), "setns", str(namespace))


_NETWORKS = itertools.count(1)
"""The system may still be taking down the last one's cables when the next one's are laid."""


@dataclass(slots=True)
class Network:
    hosts: list[Host] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)
    """Every frame that passed between hosts, some of them twice."""

    async def cut(self, host: Host) -> None:
        """Pulls its cable: nobody is told."""
        await _ip("link", "set", host.cable, "down")

    async def mend(self, host: Host) -> None:
        await _ip("link", "set", host.cable, "up")


def can_have_hosts() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"core-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=10, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)
    return made.returncode == 0


@asynccontextmanager
async def open_hosts(count: int, delays: Mapping[int, float] = MappingProxyType({})) -> AsyncIterator[Network]:
    """Up to 200 hosts that reach each other and nothing else, for the length of the block.

    `delays` are seconds, one way, that all frames take to and from the hosts of those numbers.
    """
    mark = f"{os.getpid()}{next(_NETWORKS)}"
    network, switch = Network(), f"cs{mark}"
    try:
        await _ip("link", "add", switch, "type", "bridge")
        await _ip("link", "set", switch, "up")
        async with trio.open_nursery() as nursery:
            for number in range(count):
                host = await _placed(mark, number)
                network.hosts.append(host)
                if number in delays:
                    end = await _long_cable(switch, mark, number)
                    nursery.start_soon(_carry, host.cable, end, delays[number])
                    nursery.start_soon(_carry, end, host.cable, delays[number])
                else:
                    await _ip("link", "set", host.cable, "master", switch)
                nursery.start_soon(_listen, host.cable, network.seen)
            yield network
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for number, host in enumerate(network.hosts):
                await _ip("netns", "del", host.name, check=False)
                if number in delays:
                    await _ip("link", "del", f"cx{mark}.{number}", check=False)
            await _ip("link", "del", switch, check=False)


async def _placed(mark: str, number: int) -> Host:
    host = Host(f"core-{mark}-{number}", f"10.77.0.{number + 1}", f"ch{mark}.{number}")
    await _ip("netns", "add", host.name)
    await _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    await _ip("link", "set", host.cable, "up")
    for words in (["addr", "add", f"{host.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
        await _ip("-n", host.name, *words)
    await _ip("-n", host.name, "link", "set", "lo", "up")
    return host


async def _long_cable(switch: str, mark: str, number: int) -> str:
    """The end, outside of the switch, of a cable that is plugged into it."""
    outside, inside = f"cx{mark}.{number}", f"cy{mark}.{number}"
    await _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
    await _ip("link", "set", inside, "master", switch, "up")
    await _ip("link", "set", outside, "up")
    return outside


async def _carry(cable: str, to: str, seconds: float) -> None:
    """Frames that come in by one cable go out by the other, each so much later."""
    send, receive = trio.open_memory_channel[tuple[float, bytes]](_ON_THE_WAY)
    with _frames_of(cable) as source, _frames_of(to) as sink:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_let_go, receive, sink)
            while True:
                await trio.lowlevel.wait_readable(source)
                with suppress(OSError, trio.WouldBlock):
                    frame = source.recv(_LARGEST_FRAME)
                    send.send_nowait((trio.current_time() + seconds, frame))


async def _let_go(frames: trio.MemoryReceiveChannel[tuple[float, bytes]], sink: socket.socket) -> None:
    async for due, frame in frames:
        await trio.sleep_until(due)
        with suppress(OSError):  # what a cable does not take is lost
            sink.send(frame)


@contextmanager
def _frames_of(cable: str) -> Iterator[socket.socket]:
    """What comes in there, and a way out. Each frame begins with what its host left to hardware: checksum and size."""
    if sys.platform != "linux":
        raise OSError("there are no hosts here")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as frames:
        frames.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        frames.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        frames.bind((cable, _ALL_PROTOCOLS))
        frames.setblocking(False)
        yield frames


async def _listen(cable: str, seen: bytearray) -> None:
    if sys.platform != "linux":
        raise OSError("there are no hosts here")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.bind((cable, 0))
        tap.setblocking(False)
        while True:
            await trio.lowlevel.wait_readable(tap)
            with suppress(OSError):  # told once when the cable is pulled
                seen += tap.recv(_LARGEST_FRAME)


async def _ip(*words: str, check: bool = True) -> None:
    await trio.run_process(["ip", *words], check=check, capture_stderr=not check)
