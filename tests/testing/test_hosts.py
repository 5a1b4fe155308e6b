"""Machines on one machine: what passes between them takes as long as their cables say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from core.testing.hosts import can_have_hosts, open_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_have_hosts(), reason="network namespaces can't be made here"),
]
DELAY = 0.05
LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 7))
print("listens", flush=True)
peer, _ = server.accept()
while data := peer.recv(70000):
    peer.sendall(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7), timeout=60) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    print(time.perf_counter() - started)
    peer.sendall(bytes(200_000))
    left = 200_000
    while left:
        left -= len(peer.recv(70000))
"""


async def test_a_long_cable_delays_all_frames_and_loses_none() -> None:
    with trio.fail_after(60):
        async with open_hosts(2, delays={1: DELAY}) as network:
            near, far = network.hosts
            command = far.command(sys.executable, "-c", LISTEN)
            server = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
            assert server.stdout is not None
            await server.stdout.receive_some()
            asking = near.command(sys.executable, "-c", ASK, far.address)
            asked = await trio.run_process(asking, capture_stdout=True)
            await server.wait()
            assert float(asked.stdout) >= 2 * DELAY
