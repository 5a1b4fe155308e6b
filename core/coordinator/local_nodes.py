"""Node processes on the coordinator's own machine: the default that makes one machine enough."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import trio

LOCAL_PREFIX = "local-"
"""Begins the id that the coordinator gives a node which it starts. It proves nothing: the token does."""
LOCAL_TOKEN = "CORE_LOCAL_TOKEN"
"""The environment variable in which a local node finds its token, in hexadecimal."""
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0
_OWN_GROUP: dict[str, Any] = (
    {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}  # CREATE_NEW_PROCESS_GROUP
)
"""Ctrl-C in a terminal goes to this process alone, which then ends its nodes in its own order."""
_log = logging.getLogger(__name__)


async def run_local_nodes(node_ids: Sequence[str], options: Sequence[str], token: bytes) -> None:
    """Keeps one `core node` process per id alive until cancelled; none outlives this process, however it ends.

    By `token` the coordinator knows that it started them. A process that ends is started again after a wait that
    doubles up to 30 s.
    """
    async with trio.open_nursery() as nursery:
        for node_id in node_ids:
            nursery.start_soon(_keep_alive, node_id, options, {**os.environ, LOCAL_TOKEN: token.hex()})


async def _keep_alive(node_id: str, options: Sequence[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "core", "node", "--node-id", node_id, "--end-with-stdin", *options]
    wait = FIRST_WAIT_SECONDS
    while True:
        started = trio.current_time()
        try:
            end = f"ended with status {await _run_to_its_end(command, environment)}"
        except OSError as error:
            end = f"can't be started: {error}"
        if trio.current_time() - started > _HEALTHY_SECONDS:
            wait = FIRST_WAIT_SECONDS
        _log.warning("%s %s; it is started again in %.2g s", node_id, end, wait)
        await trio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)


async def _run_to_its_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The child ends when its standard input does, which is when this process ends, however that comes about."""
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, env=environment, **_OWN_GROUP)
    try:
        return await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            process.terminate()  # one that still imports reads nothing
            with trio.move_on_after(2):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
