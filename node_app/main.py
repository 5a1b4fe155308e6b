"""`core-node`: the app with an icon, or headless where there is no tray or none is wanted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core import __version__
from core.errors import ConfigError, CoreError
from core.trust.state_dir import StateDir
from node_app import logs
from node_app.app import App
from node_app.desktop import browse
from node_app.files import Folders
from node_app.process import Process
from node_app.settings import SettingsFile
from node_app.single import AlreadyRunning, Running, find_running, only_one


def main() -> None:
    status = 0
    try:
        status = _run(_options(sys.argv[1:]))
    except CoreError as error:
        print(error, file=sys.stderr)
        status = 2 if isinstance(error, ConfigError) else 1
    sys.exit(status)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="core-node", description="Lend this machine to a cluster: with an icon in the tray, or headless."
    )
    parser.add_argument(
        "invite", nargs="?", metavar="INVITE", help="the invite to join by; - reads it from standard input"
    )
    parser.add_argument("--headless", action="store_true", help="no icon; prints the address of the status page")
    parser.add_argument("--folder", type=Path, help="where settings, state and log are kept. Default: the platform's")
    parser.add_argument("--version", action="version", version=f"core {__version__}")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    folders = Folders.under(options.folder) if options.folder else Folders.of_user()
    state = StateDir.open(folders.state)
    invite = sys.stdin.readline().strip() if options.invite == "-" else options.invite
    try:
        with only_one(state):
            log = folders.logs / "core-node.log"
            logs.set_up(log, to_stderr=options.headless)
            app = App(SettingsFile(folders.config / "settings.json"), state, log, __version__)
            if invite is not None:
                _join(app, invite, headless=options.headless)
            return Process(app, log).run(headless=options.headless, welcome=invite is not None)
    except AlreadyRunning:
        _hand_over(find_running(state), invite, headless=options.headless)
        return 0


def _join(app: App, invite: str, *, headless: bool) -> None:
    """Raises ConfigError for an invite that can't be, where it is headless. Else the page opens and takes another."""
    if headless:
        app.join(invite)
    elif refusal := app.attempt(app.join, invite):
        print(refusal, file=sys.stderr)


def _hand_over(running: Running, invite: str | None, *, headless: bool) -> None:
    """The page opens even where the invite is refused: it tells why."""
    try:
        if invite is not None:
            running.join(invite)
        print("core-node runs already" + ("" if invite is None else ", and has the invite"))
        print(f"status page  {running.url}")
    finally:
        if not headless:
            browse(running.ticket())
