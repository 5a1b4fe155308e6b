"""From pasting an invite to a ready route: a coordinator without nodes of its own, and one friend who joins by a link.

Both are on this machine, over its own address, encrypted as between two. The model and its hashes are cached: a round
before the first is not counted. The friend's first join makes its key; it has nothing loaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio
from _measure import machine, spread, verdict

from core.cli.demo_model import demo_model
from core.testing.cluster import Cluster, open_cluster
from core.trust.invite import new_invite
from core.trust.state_dir import StateDir

GOAL_SECONDS = 15.0
HOUR = 3600


async def seconds_to_ready() -> float:
    with tempfile.TemporaryDirectory() as folder:
        host, friend = Path(folder, "host"), Path(folder, "friend")
        options = ("--node-host", "0.0.0.0", "--state-dir", str(host))
        async with open_cluster(demo_model(), *options) as cluster:
            await cluster.wait_until(lambda status: "must join" in status["detail"])
            _, link = new_invite(StateDir.open(host), HOUR)
            return await join(cluster, str(link), friend)


async def join(cluster: Cluster, link: str, state: Path) -> float:
    command = [sys.executable, "-m", "core", "node", "--join", "-", "--threads", "1", "--state-dir", str(state)]
    started = time.perf_counter()
    node = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert node.stdin is not None
    try:
        await node.stdin.send_all(f"{link}\n".encode())
        await cluster.wait_ready()
        return time.perf_counter() - started
    finally:
        node.terminate()
        with trio.CancelScope(shield=True):
            await node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(machine())
    seconds = [trio.run(seconds_to_ready) for _ in range(rounds + 1)][1:]
    print(f"from the pasted link to ready: {spread(seconds, 's')}")
    print(verdict(f"{GOAL_SECONDS:g} s", max(seconds) <= GOAL_SECONDS))


if __name__ == "__main__":
    main()
