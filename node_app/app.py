"""The app: the node, and around it courtesy, status, settings and page. Headless and with an icon it is the same."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import trio

from core.discovery.advert import Advert
from core.discovery.multicast import find
from core.errors import ConfigError, CoreError
from core.plugins import PluginHost
from core.trust.cluster import Cluster
from core.trust.state_dir import StateDir
from node_app import desktop, logs
from node_app.desktop import browse
from node_app.gpu import gpu_meter
from node_app.joining import SCHEME, Offer, Target, accept, ask, forget, remembered
from node_app.machine import Machine, Meter
from node_app.node_runner import DesiredState, NodeRunner
from node_app.page import Page
from node_app.pause_policy import SERVE, SERVE_ALTHOUGH_USED, Measurements, Verdict, decide
from node_app.settings import Limits, Settings, SettingsFile
from node_app.single import announce, withdraw
from node_app.status import State, Status, sentence
from node_app.status_text import Facts, status_of
from node_app.usage_counter import UsageCounter

TICK_SECONDS = 1.0
_TALLY = "tokens.json"
_SAVE_TICKS = 60
_log = logging.getLogger(__name__)


class App:
    """`run` runs it; everything else is called in its trio thread, or before."""

    def __init__(
        self,
        settings: SettingsFile,
        state: StateDir,
        log: Path,
        version: str,
        browse: Callable[[str], bool] = browse,
        plugins: Callable[[], PluginHost] = PluginHost.installed,
    ) -> None:
        self.settings = settings.load(Settings(node_id=_fresh_node_id(), joined=remembered(state)))
        if settings.complaint:
            _log.warning("%s", settings.complaint)
        self.status = Status()
        self.machine = Machine.here()
        self.offer: Offer | None = None
        self.end_process: Callable[[], None] = self.quit
        """Ends the process around the app, and the app with it."""
        self.page = Page(self, version)
        self._file = settings
        self._state = state
        self._log_path = log
        self._show: Callable[[Status], None] = lambda _: None
        self._browse = browse
        self._measured: Measurements | None = None
        self._verdict: Verdict = SERVE
        self._node_runner = NodeRunner(state, plugins, self._publish)
        self._refusal = ""
        self._asked: Cluster | None = None
        """Whose host was asked to let this machine in."""
        self._unsaved = ""
        self._found: dict[str, Advert] = {}
        self._usage = UsageCounter(state.read(_TALLY), datetime.now())
        self._quitting = self._ending = False
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `quit`, and the node's goodbye. Reports when the page is served."""
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.page.run)
            self.attempt(announce, self._state, self.page.url)
            task_status.started()
            self._nursery.start_soon(self._tick)
            self._wish()
            await self._node_runner.run()
            self._nursery.cancel_scope.cancel()
        self._save_tally()

    def quit(self) -> None:
        self._quitting = True
        self._node_runner.quit()
        self.attempt(withdraw, self._state)

    def end(self) -> None:
        """`end_process`, asked for on the page: once, however often it is pressed."""
        if not self._ending:
            self._ending = True
            self.end_process()

    @property
    def starts_at_login(self) -> bool:
        return desktop.present(desktop.login_entries())

    def start_at_login(self, wanted: bool) -> None:
        """Raises ConfigError where the desktop does not take it."""
        change = desktop.write if wanted else desktop.remove
        change(desktop.login_entries())

    @property
    def free_memory(self) -> int:
        """Bytes, 0 before they were measured."""
        return self._measured.free_memory if self._measured else 0

    @property
    def notice(self) -> str:
        """What the user should know of the app itself, "" for nothing."""
        return ". ".join(filter(None, (self._file.complaint, self._refusal, self._unsaved)))

    @property
    def resumable(self) -> bool:
        """Whether a pause is its user's, or one that they can end: for others' use."""
        return self.settings.paused or self._verdict.until is not None

    def join(self, invite: str) -> None:
        self._join(accept(invite, self._state))

    def follow(self, link: str) -> None:
        """For a link that was opened elsewhere than on the page, by a browser perhaps: the page offers it, and a
        refusal is to be read there. What no browser opens is joined."""
        if refusal := self.attempt(self._follow, link):
            raise refusal

    def _follow(self, link: str) -> None:
        if not link.strip().startswith(SCHEME):
            self.join(link)
            return
        self.offer = None
        self.offer, self._refusal = Offer.of(link), ""
        self._publish()

    def dismiss_offer(self) -> None:
        self.offer = None

    def _join(self, target: Target, asked: Cluster | None = None) -> None:
        self.offer, self._asked = None, asked
        self._change(replace(self.settings, joined=target), anew=True)

    async def look_around(self) -> list[Advert]:
        found = await find()
        self._found = {cluster.key: cluster for cluster in found}
        return found

    def ask(self, key: str) -> None:
        if key not in self._found:
            raise ConfigError("this cluster was not found", "it may have ended", "look again")
        cluster = self._found[key].cluster()
        self._join(ask(cluster, self._state), cluster)

    def leave_cluster(self) -> None:
        if self.settings.joined is not None and self.settings.joined.invited:
            forget(self._state)
        self._asked = None
        self._change(replace(self.settings, joined=None, paused=False))

    def pause(self) -> None:
        self._change(replace(self.settings, paused=True))

    def resume(self) -> None:
        """Ends a pause for others' use as well, until there is new use; and has what failed tried again, the host that
        refused included."""
        failed = self.status.state is State.ERROR
        if failed and self._asked is not None:
            ask(self._asked, self._state)
        self._verdict = self._judged(self.settings.limits, SERVE_ALTHOUGH_USED)
        self._change(replace(self.settings, paused=False), anew=failed)

    def change_limits(self, limits: Limits) -> None:
        """A pause that its user has ended stays so, while others use the machine as they did."""
        self._verdict = self._judged(limits, SERVE_ALTHOUGH_USED if self._verdict.although else SERVE)
        self._change(replace(self.settings, limits=limits), anew=self.status.state is State.ERROR)

    def show_to(self, show: Callable[[Status], None]) -> None:
        """From now on `show` hears of each new status, and of the present one at once."""
        self._show = show
        show(self.status)

    def attempt(self, call: Callable[..., None], *arguments: object) -> CoreError | None:
        """`call(*arguments)`. What it refuses is shown to the user, and returned."""
        try:
            call(*arguments)
        except CoreError as error:
            _log.error("%s", error)
            self._refusal = str(error)
            self._publish()
            return error
        return None

    def open_page(self, part: str = "") -> None:
        """In the user's browser; opening one may take a while, which nobody waits for."""
        if self._nursery is not None and not self._quitting:
            self._nursery.start_soon(self._open, self.page.ticket() + (f"#{part}" if part else ""))

    async def _open(self, url: str) -> None:
        if not await trio.to_thread.run_sync(self._browse, url, abandon_on_cancel=True):
            _log.warning("no browser opens the status page")

    def log_tail(self, size: int) -> str:
        return logs.tail(self._log_path, size)

    def _change(self, settings: Settings, *, anew: bool = False) -> None:
        """Holds although it can't be saved. Raises ConfigError then."""
        self.settings, self._refusal = settings, ""
        self._wish(anew=anew)
        self._apply_pause()
        self._publish()
        try:
            self._file.save(settings)
        except ConfigError as error:
            raise ConfigError(error.title, error.message, "it holds until core-node ends") from None

    def _wish(self, *, anew: bool = False) -> None:
        limits, joined, node_id = self.settings.limits, self.settings.joined, self.settings.node_id
        asked = limits.memory_gb, limits.threads, limits.device, self.settings.labels
        wish = DesiredState(joined, node_id, *asked) if joined else None
        self._node_runner.wish(wish, anew=anew)

    async def _tick(self) -> None:
        with gpu_meter() as gpu_load:
            meter = Meter(gpu_load)
            ticks = 0
            while True:
                activity = self._node_runner.activity
                self._usage.note(activity.tokens if activity else 0, datetime.now())
                self._measured = await trio.to_thread.run_sync(meter.measure, self.status.memory)
                self._verdict = self._judged(self.settings.limits, self._verdict)
                self._apply_pause()
                self._publish()
                ticks += 1
                if ticks % _SAVE_TICKS == 0:
                    self._save_tally()
                await trio.sleep(TICK_SECONDS)

    def _judged(self, limits: Limits, last: Verdict) -> Verdict:
        return decide(limits, self._measured, datetime.now(), last) if self._measured else last

    def _save_tally(self) -> None:
        try:
            self._state.write(_TALLY, self._usage.save())
            self._unsaved = ""
        except CoreError as error:
            _log.error("%s", error)
            self._unsaved = str(error)

    def _apply_pause(self) -> None:
        self._node_runner.pause("by its user" if self.settings.paused else self._verdict.reason)

    def _publish(self) -> None:
        if self._quitting:
            return
        facts = Facts(
            cluster=str(self.settings.joined or ""),
            refusal=self._refusal,
            pause="until you resume it" if self.settings.paused else self._verdict.reason,
            failure=self._node_runner.failure,
            tokens_today=self._usage.today,
            tokens_per_second=self._usage.per_second,
        )
        status = status_of(self._node_runner.activity, facts)
        if status != self.status:
            if _told(status) != _told(self.status):
                _log.info("%s", sentence(status))
            self.status = status
            self._show(status)


def _told(status: Status) -> tuple[State, str]:
    """What of a status the log tells: not each token."""
    return State.READY if status.state is State.BUSY else status.state, status.reason


def _fresh_node_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(2)}"
