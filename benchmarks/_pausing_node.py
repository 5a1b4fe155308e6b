"""A node whose user pauses it by SIGUSR1, and has it resume by the next: the worker of recovery.py."""

from __future__ import annotations

import signal
import sys

import trio

from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty
from core.plugins import PluginHost


async def main(node_id: str, port: int) -> None:
    duty = Duty()
    settings = NodeSettings(node_id=node_id, cluster_port=port, device="cpu", threads=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_node, settings, PluginHost.installed(), Activity(), duty)
        with trio.open_signal_receiver(signal.SIGUSR1, signal.SIGTERM) as signals:
            async for number in signals:
                if number == signal.SIGTERM:
                    break
                if duty.paused:
                    duty.resume()
                else:
                    duty.pause("a game")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[2], int(sys.argv[3]))  # --node-id NAME PORT
