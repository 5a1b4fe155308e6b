"""`core-node`: the app with an icon, or headless where there is no tray or none is wanted."""

from __future__ import annotations

import argparse
import os
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

_LONGEST_INVITE = 4096
"""Bytes; a pipe holds so many, and no invite has more."""


def main() -> None:
    status = 0
    try:
        options = _options(sys.argv[1:])
        if options.invite is not None and options.invite != "-":
            _take_from_command_line(options.invite)
        status = _run(options)
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


def _take_from_command_line(invite: str) -> None:
    """Every user of a machine can read command lines: this program begins again, with the invite on standard input.

    On Windows its own user alone can.
    """
    if sys.platform == "win32":
        return
    ours, theirs = os.pipe()
    os.write(theirs, invite.encode(errors="replace")[:_LONGEST_INVITE] + b"\n")
    os.close(theirs)
    os.dup2(ours, 0)
    os.close(ours)
    given = sys.argv[1:] if getattr(sys, "frozen", False) else sys.orig_argv[1:]
    os.execv(sys.executable, [sys.executable, *("-" if each == invite else each for each in given)])


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
                _follow(app, invite, headless=options.headless)
            return Process(app, log).run(headless=options.headless, welcome=invite is not None)
    except AlreadyRunning:
        _hand_over(find_running(state), invite, headless=options.headless)
        return 0


def _follow(app: App, invite: str, *, headless: bool) -> None:
    """Headless, somebody typed it: it is joined. Raises ConfigError for one that can't be.

    Otherwise a browser may have opened it: the page shows it, and takes another if it can't be.
    """
    if headless:
        app.join(invite)
        return
    try:
        app.follow(invite)
    except CoreError as refusal:
        print(refusal, file=sys.stderr)


def _hand_over(running: Running, invite: str | None, *, headless: bool) -> None:
    """The page opens even where the invite is refused: it tells why. A link waits there for its user's word."""
    try:
        if invite is not None:
            (running.join if headless else running.follow)(invite)
        print("core-node runs already" + ("" if invite is None else ", and has the invite"))
        print(f"status page  {running.url}")
    finally:
        if not headless:
            browse(running.ticket())
