"""The app: the node, and around it courtesy, status, settings and page. Headless and with an icon it is the same."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from core.discovery.advert import Advert
from core.discovery.multicast import find
from core.errors import ConfigError, CoreError, sole_error
from core.node.settings import NodeSettings
from core.plugins import PluginHost
from core.trust.state_dir import StateDir
from node_app import logs
from node_app.courtesy import SERVE, Verdict, decide
from node_app.gpu import gpu_meter
from node_app.joining import Target, accept, ask, forget, membership
from node_app.machine import Meter, measured_load, polite_threads
from node_app.page import Page
from node_app.settings import Limits, Settings, SettingsFile
from node_app.shown import Facts, status_of
from node_app.single import announce
from node_app.status import State, Status, sentence
from node_app.tally import Tally

if TYPE_CHECKING:
    from node_app.node import RunningNode

TICK_SECONDS = 1.0
QUIT_SECONDS = 5.0
"""What quitting gives the generations that run on this machine."""
GOODBYE_SECONDS = 2.0
"""What it then gives the goodbye."""
_TALLY = "tokens.json"
_SAVE_TICKS = 60
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a node is started with: when it changes, the node leaves and a new one starts.

    `accepted` counts invites and requests: a second one to the same place is another wish.
    """

    target: Target
    accepted: int
    memory_gb: float | None
    threads: int | None
    device: str


class App:
    """`run` runs it; everything else is called in its trio thread."""

    def __init__(
        self,
        settings: SettingsFile,
        state: StateDir,
        log: Path,
        version: str,
        browse: Callable[[str], object] | None = None,
        plugins: Callable[[], PluginHost] = PluginHost.installed,
    ) -> None:
        """`browse` None: the user's browser."""
        self.settings = settings.load(Settings(node_id=_fresh_node_id()))
        self.status = Status()
        self.notice = settings.complaint
        self.page = Page(self, version)
        self._file = settings
        self._state = state
        self._log_path = log
        self._show: Callable[[Status], None] = lambda _: None
        self._browse = browse or _browse
        self._plugins = plugins
        self._verdict: Verdict = SERVE
        self._node: RunningNode | None = None
        self._failure = ""
        self._accepted = 0
        self._found: dict[str, Advert] = {}
        self._tally = Tally(state.read(_TALLY), datetime.now())
        self._changed = trio.Event()
        self._quit = trio.Event()
        self._left = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `quit`: then the node says goodbye, which is given a few seconds. Reports when the page is served."""
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.page.run)
            announce(self._state, self.page.port, self.page.token)
            task_status.started()
            self._nursery.start_soon(self._tick)
            self._nursery.start_soon(self._serve)
            await self._quit.wait()
            with trio.move_on_after(QUIT_SECONDS + GOODBYE_SECONDS):
                await self._left.wait()
            self._nursery.cancel_scope.cancel()
        self._state.write(_TALLY, self._tally.save())

    def quit(self) -> None:
        self._quit.set()
        self._settings_changed()

    def join(self, invite: str) -> None:
        self._join(accept(invite, self._state))

    def _join(self, target: Target) -> None:
        self._failure = ""
        self._accepted += 1
        self._change(replace(self.settings, joined=target))

    async def look_around(self) -> list[Advert]:
        found = await find()
        self._found = {cluster.key: cluster for cluster in found}
        return found

    def ask(self, key: str) -> None:
        if key not in self._found:
            raise ConfigError("this cluster was not found", "it may have ended", "look again")
        self._join(ask(self._found[key], self._state))

    def leave_cluster(self) -> None:
        self._failure = ""
        if self.settings.joined is not None and self.settings.joined.invited:
            forget(self._state)
        self._change(replace(self.settings, joined=None))

    def pause(self) -> None:
        self._change(replace(self.settings, paused=True))

    def resume(self) -> None:
        """Ends a courtesy pause as well, until there is a new reason for one."""
        self._verdict = SERVE
        self._change(replace(self.settings, paused=False))

    def change_limits(self, limits: Limits) -> None:
        self._failure, self._verdict = "", SERVE
        self._change(replace(self.settings, limits=limits))

    def show_to(self, show: Callable[[Status], None]) -> None:
        """From now on `show` hears of each new status, and of the present one at once."""
        self._show = show
        show(self.status)

    def attempt(self, call: Callable[..., None], *arguments: object) -> None:
        """`call(*arguments)`, of which a failure is shown to the user."""
        try:
            call(*arguments)
        except CoreError as error:
            self.notice = str(error)
            _log.error("%s", error)

    def open_page(self, part: str = "") -> None:
        """In the user's browser; opening one may take a while, which nobody waits for."""
        assert self._nursery is not None
        url = self.page.ticket() + (f"#{part}" if part else "")
        self._nursery.start_soon(trio.to_thread.run_sync, self._browse, url)

    def log_tail(self, size: int) -> str:
        return logs.tail(self._log_path, size)

    def _change(self, settings: Settings) -> None:
        self._file.save(settings)
        self.settings = settings
        self._settings_changed()

    def _settings_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self._apply_pause()
        self._publish()

    async def _tick(self) -> None:
        with gpu_meter() as gpu_load:
            meter = Meter(gpu_load)
            ticks = 0
            while True:
                now = datetime.now()
                self._tally.note(self._node.activity.tokens if self._node else 0, now)
                measured = await trio.to_thread.run_sync(meter.measure, self.status.memory)
                self._verdict = decide(self.settings.limits, measured, now, self._verdict)
                self._apply_pause()
                self._publish()
                ticks += 1
                if ticks % _SAVE_TICKS == 0:
                    self._state.write(_TALLY, self._tally.save())
                await trio.sleep(TICK_SECONDS)

    def _apply_pause(self) -> None:
        if self._node is not None:
            self._node.duty.pause(self._pause_reason())

    def _pause_reason(self) -> str:
        return "paused by its user" if self.settings.paused else self._verdict.reason

    def _publish(self) -> None:
        if self._quit.is_set():
            return
        facts = Facts(
            cluster=str(self.settings.joined or ""),
            pause=self._pause_reason(),
            failure=self._failure,
            tokens_today=self._tally.today,
            tokens_per_second=self._tally.per_second,
        )
        status = status_of(self._node.activity if self._node else None, facts)
        if status != self.status:
            if _told(status) != _told(self.status):
                _log.info("%s", sentence(status))
            self.status = status
            self._show(status)

    def _wish(self) -> _Wish | None:
        limits, joined = self.settings.limits, self.settings.joined
        if joined is None or self._quit.is_set():
            return None
        return _Wish(joined, self._accepted, limits.memory_gb, limits.threads, limits.device)

    async def _serve(self) -> None:
        """Keeps a node as the settings wish it. One that failed is started again when they change."""
        while not self._quit.is_set():
            wish = self._wish()
            if wish is not None and not self._failure:
                try:
                    await self._run_node(wish)
                except CoreError as error:
                    self._failure = str(error)
                    _log.error("%s", error)
                except Exception as error:
                    self._failure = f"the node failed ({type(error).__name__}); the log says more"
                    _log.exception("the node failed")
                self._node = None
                self._publish()
            elif not self._quit.is_set():
                await self._changed.wait()
        self._left.set()

    async def _run_node(self, wish: _Wish) -> None:
        """Until it has left, because of another wish."""
        self._node = node = await trio.to_thread.run_sync(self._make_node, wish)
        self._apply_pause()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_when_unwanted, wish, node)
                await node.run()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None

    def _make_node(self, wish: _Wish) -> RunningNode:
        """In a thread, for it imports torch: the icon is there by then."""
        from node_app.node import RunningNode

        settings = NodeSettings(
            node_id=socket.gethostname() if wish.target.invited else self.settings.node_id,
            membership=membership(self._state) if wish.target.invited else None,
            cluster_host=wish.target.host,
            cluster_port=wish.target.port,
            device=wish.device,
            max_memory=None if wish.memory_gb is None else int(wish.memory_gb * 10**9),
            threads=wish.threads or polite_threads(measured_load()),
        )
        return RunningNode(settings, self._plugins(), self._publish)

    async def _leave_when_unwanted(self, wish: _Wish, node: RunningNode) -> None:
        while self._wish() == wish:
            await self._changed.wait()
        if self._quit.is_set():
            node.duty.leave("its user quit", patience=QUIT_SECONDS)
        else:
            node.duty.leave("its settings were changed")


def _told(status: Status) -> tuple[State, str]:
    """What of a status the log tells: not each token."""
    return State.READY if status.state is State.BUSY else status.state, status.reason


def _browse(url: str) -> None:
    """The browser must not inherit that this process blocks signals."""
    if sys.platform == "win32":
        webbrowser.open(url)
        return
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        webbrowser.open(url)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _fresh_node_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(2)}"
