"""Keeps a node as it is wished: one at a time, which leaves when another is wished."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from core.errors import CoreError, sole_error
from core.node.settings import NodeSettings
from core.plugins import PluginHost
from core.trust.state_dir import StateDir
from node_app.joining import Target, membership
from node_app.machine import measured_load, polite_threads

if TYPE_CHECKING:
    from core.node.state import Activity
    from node_app.node import RunningNode

QUIT_SECONDS = 5.0
"""What quitting gives the generations that run on this machine."""
GOODBYE_SECONDS = 2.0
"""What it then gives the goodbye."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What a node is started with. `node_id` is its own only where it joins without an invite."""

    target: Target
    node_id: str
    memory_gb: float | None
    threads: int | None
    device: str
    labels: tuple[str, ...] = ()


class NodeRunner:
    """`run` runs it. `changed` hears when `activity` or `failure` say something else."""

    def __init__(self, state: StateDir, plugins: Callable[[], PluginHost], changed: Callable[[], None]) -> None:
        self.failure = ""
        self._state = state
        self._plugins = plugins
        self._tell = changed
        self._node: RunningNode | None = None
        self._wish: DesiredState | None = None
        self._wishes = 0
        self._pause = ""
        self._quitting = False
        self._patience = trio.CancelScope()
        self._changed = trio.Event()

    @property
    def activity(self) -> Activity | None:
        """None while no node runs."""
        return self._node.activity if self._node else None

    def wish(self, wish: DesiredState | None, *, anew: bool = False) -> None:
        """The same wish leaves the node that runs, or the failure, as it is, unless it is to be `anew`."""
        if anew or wish != self._wish:
            self._wish, self.failure = wish, ""
            self._wishes += 1
            self._changed.set()
            self._changed = trio.Event()

    def pause(self, reason: str) -> None:
        """ "" for none."""
        self._pause = reason
        if self._node is not None:
            self._node.duty.pause(reason)

    def quit(self) -> None:
        self._quitting = True
        self._patience.deadline = trio.current_time() + QUIT_SECONDS + GOODBYE_SECONDS
        self.wish(None, anew=True)

    async def run(self) -> None:
        """Until `quit`: then the node says goodbye, which is given a few seconds."""
        with self._patience:
            while not self._quitting:
                if self._wish is None or self.failure:
                    await self._changed.wait()
                else:
                    await self._serve(self._wish, self._wishes)

    async def _serve(self, wish: DesiredState, number: int) -> None:
        failure = ""
        try:
            await self._run_node(wish, number)
        except CoreError as error:
            failure = str(error)
            _log.error("%s", error)
        except Exception as error:
            failure = f"the node failed ({type(error).__name__}); the log says more"
            _log.exception("the node failed")
        self._node = None
        if number == self._wishes:
            self.failure = failure
        self._tell()

    async def _run_node(self, wish: DesiredState, number: int) -> None:
        """Until it has left, because of another wish."""
        self._node = node = await trio.to_thread.run_sync(self._make_node, wish)
        self.pause(self._pause)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_when_unwanted, node, number)
                await node.run()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None

    def _make_node(self, wish: DesiredState) -> RunningNode:
        """In a thread, for it imports torch: the icon is there by then."""
        from node_app.node import RunningNode

        settings = NodeSettings(
            node_id=socket.gethostname() if wish.target.invited else wish.node_id,
            membership=membership(self._state) if wish.target.invited else None,
            cluster_host=wish.target.host,
            cluster_port=wish.target.port,
            device=wish.device,
            max_memory=None if wish.memory_gb is None else int(wish.memory_gb * 10**9),
            labels=wish.labels,
            threads=wish.threads or polite_threads(measured_load()),
        )
        return RunningNode(settings, self._plugins(), self._tell)

    async def _leave_when_unwanted(self, node: RunningNode, number: int) -> None:
        while self._wishes == number:
            await self._changed.wait()
        if self._quitting:
            node.duty.leave("its user quit", patience=QUIT_SECONDS)
        else:
            node.duty.leave("its settings were changed")
