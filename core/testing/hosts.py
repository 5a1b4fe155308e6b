"""Machines on one machine, for tests of what passes between them: network namespaces joined by a bridge, and a tap.

Needs Linux, root, and the command `ip`; `can_have_hosts` says whether all is there.

    async with open_hosts(3) as network:
        await trio.run_process(network.hosts[0].command("ping", "-c1", network.hosts[1].address))
        assert b"secret" not in network.seen
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

_ALL_PROTOCOLS = 3
_NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of sched.h."""
_LARGEST_FRAME = 70_000


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
async def open_hosts(count: int) -> AsyncIterator[Network]:
    """Up to 200 hosts that reach each other and nothing else, for the length of the block."""
    mark = f"{os.getpid()}{next(_NETWORKS)}"
    network, switch = Network(), f"cs{mark}"
    try:
        await _ip("link", "add", switch, "type", "bridge")
        await _ip("link", "set", switch, "up")
        for number in range(count):
            network.hosts.append(await _plugged_in(switch, mark, number))
        async with trio.open_nursery() as nursery:
            for host in network.hosts:
                nursery.start_soon(_listen, host.cable, network.seen)
            yield network
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for host in network.hosts:
                await _ip("netns", "del", host.name, check=False)
            await _ip("link", "del", switch, check=False)


async def _plugged_in(switch: str, mark: str, number: int) -> Host:
    host = Host(f"core-{mark}-{number}", f"10.77.0.{number + 1}", f"ch{mark}.{number}")
    await _ip("netns", "add", host.name)
    await _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    await _ip("link", "set", host.cable, "master", switch, "up")
    for words in (["addr", "add", f"{host.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
        await _ip("-n", host.name, *words)
    await _ip("-n", host.name, "link", "set", "lo", "up")
    return host


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
