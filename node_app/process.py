"""The process around the app: trio in a thread of its own, the icon on the main one, and an end that never hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import trio

from core import __version__
from core.errors import CoreError, sole_error
from core.port_limits import raise_open_files
from node_app import desktop
from node_app.app import App
from node_app.node_runner import QUIT_SECONDS
from node_app.status import Action

WATCHDOG_SECONDS = QUIT_SECONDS + 10.0
"""After so long, a process that was told to end is ended; where each of its threads was is in the log."""
ICON_SECONDS = 2.0
"""What the icon has left to go, once all else has ended."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_PARTS = {Action.JOIN: "join", Action.PAGE: "", Action.LIMITS: "limits", Action.LOGS: "log", Action.ABOUT: "about"}
_log = logging.getLogger(__name__)


class Process:
    def __init__(self, app: App, log: Path) -> None:
        self._app = app
        app.end_process = self.quit
        self._log_path = log
        self._token: trio.lowlevel.TrioToken | None = None
        self._started = threading.Event()
        self._quitting = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_trio, name="trio")
        self._stop_tray: Callable[[], None] = lambda: None
        self._tray_gone = threading.Event()
        self._tray_gone.set()

    def run(self, *, headless: bool, welcome: bool) -> int:
        """The exit status, once the app has ended: by its menu, or by SIGTERM or Ctrl-C.

        The page opens for a `welcome`, where nothing is joined and where there is a notice; not where it is headless.
        """
        raise_open_files()
        self._heed_signals()
        self._thread.start()
        self._started.wait()
        if not self._failure:
            self._show(headless=headless, welcome=welcome)
        while self._thread.is_alive():
            self._thread.join(0.5)  # on Windows, a join without an end keeps Ctrl-C waiting
        if self._failure is None:
            return 0
        if isinstance(self._failure, CoreError):
            raise self._failure
        _log.critical("the app failed", exc_info=self._failure)
        print(f"core-node failed; {self._log_path} says more", file=sys.stderr)
        return 1

    def _show(self, *, headless: bool, welcome: bool) -> None:
        if not headless:
            joined = self._app.settings.joined is not None
            if welcome or not joined or self._app.notice:
                self._in_trio(self._app.open_page, "" if joined else "join")
            if not (reason := self._run_tray()):
                return
            _log.warning("no tray: %s", reason)
            print(f"There is no tray here ({reason}). The node runs without an icon.", flush=True)
        print(f"status page  {self._app.page.url}", flush=True)

    def quit(self) -> None:
        """From any thread. The second time it is asked for, the process ends at once."""
        if self._quitting.is_set():
            os._exit(130)
        self._quitting.set()
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True, file=_opened(self._log_path))
        self._in_trio(self._app.quit)

    def _run_trio(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failure = sole_error(error)
        finally:
            self._started.set()
            self._end_tray()

    def _end_tray(self) -> None:
        """One that does not go when it is told, as pystray's plain X11 icon now and then, goes with the process."""
        self._stop_tray()
        if not self._tray_gone.wait(ICON_SECONDS):
            _log.warning("the icon did not go by itself")
            logging.shutdown()
            os._exit(0 if self._failure is None else 1)

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._app.run)
            self._token = trio.lowlevel.current_trio_token()
            if self._quitting.is_set():
                self._app.quit()
            self._started.set()

    def _in_trio(self, call: Callable[..., None], *arguments: object) -> None:
        """Where it is refused, the page opens: there it is told."""
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._attempt, call, *arguments)
            except trio.RunFinishedError:
                return

    def _attempt(self, call: Callable[..., None], *arguments: object) -> None:
        if self._app.attempt(call, *arguments):
            self._app.open_page()

    def _run_tray(self) -> str:
        """Until the app ends; "". Or not at all, and why."""
        try:
            from node_app.tray import NoTray, Tray
        except ImportError as error:
            return f"{error}: install core-cluster[tray]"
        _register_links()
        try:
            tray = Tray(self._perform, lambda: (self._app.resumable, self._app.starts_at_login), __version__)
            self._stop_tray = tray.stop
            self._tray_gone.clear()
            tray.run(lambda: self._in_trio(self._app.show_to, tray.show))
            return ""
        except NoTray as error:
            self._stop_tray = lambda: None
            return str(error)
        finally:
            self._tray_gone.set()

    def _perform(self, action: Action) -> None:
        """In the icon's thread."""
        if action in _PARTS:
            self._in_trio(self._app.open_page, _PARTS[action])
        elif action is Action.PAUSE:
            self._in_trio(self._app.pause)
        elif action is Action.RESUME:
            self._in_trio(self._app.resume)
        elif action is Action.START_AT_LOGIN:
            self._toggle_login()
        elif action is Action.QUIT:
            self.quit()

    def _toggle_login(self) -> None:
        """Here and now, for the menu shows next what has become of it."""
        try:
            self._app.start_at_login(not self._app.starts_at_login)
        except CoreError as error:
            self._in_trio(_refuse, error)

    def _heed_signals(self) -> None:
        """Signals are taken by a thread of their own: the icon's main loop is C, and resets Python's handlers."""
        if sys.platform == "win32":
            for number in _SIGNALS:
                signal.signal(number, lambda *_: self.quit())
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            threading.Thread(target=self._await_signals, name="signals", daemon=True).start()

    def _await_signals(self) -> None:
        if sys.platform == "win32":
            return
        while True:
            signal.sigwait(_SIGNALS)
            self.quit()


def _opened(log: Path) -> int:
    """A file to append to; nowhere, where the log's folder is gone."""
    try:
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _refuse(error: CoreError) -> None:
    raise error


def _register_links() -> None:
    """Each time it starts, for the program may have moved. Where the desktop doesn't take it, the page is left."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    entries = desktop.for_links(sys.platform, Path.home(), desktop.command(), data)
    try:
        desktop.write(entries)
        if sys.platform not in ("win32", "darwin"):
            desktop.announce_links(data)
    except (CoreError, OSError) as error:
        _log.warning("core:// links will not open this app: %s", error)
