"""The icon: pystray's, on the main thread. The only file that knows pystray.

Whatever goes wrong with it is a NoTray: the desktops that it runs on fail in many ways, and the node runs without one.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from node_app.pictures import icon
from node_app.status import SEPARATOR, Action, Line, Status, menu, tooltip

if TYPE_CHECKING:
    from PIL import Image

FIGURES_SECONDS = 15.0
"""The menu's figures are refreshed so often at most, for many desktops close an open menu that changes."""
_log = logging.getLogger(__name__)


class NoTray(Exception):
    """This desktop shows no icon, for the reason that it carries."""


class Tray:
    """`run` shows the icon and keeps the main thread; `show` and `stop` are called from other threads.

    `perform` is called for each line of the menu that is chosen. Raises NoTray.
    """

    def __init__(self, perform: Callable[[Action], None], ask: Callable[[], tuple[bool, bool]], version: str) -> None:
        """`ask` tells whether the user can end a pause, and whether the app starts at login."""
        try:
            import pystray
        except Exception as error:
            raise NoTray(f"{type(error).__name__}: {error}") from error
        self._pystray = pystray
        self._perform = perform
        self._ask = ask
        self._version = version
        self._status = Status()
        self._lines = self._menu_lines()
        self._drawn = 0.0
        self._stopped = False
        self._picture: Image.Image = icon(self._status)
        self._icon = pystray.Icon("core-node", self._picture, tooltip(self._status), pystray.Menu(self._items))

    def run(self, ready: Callable[[], None]) -> None:
        """Until `stop`. `ready` is called once the icon is there. Raises NoTray."""

        def show(shown: Any) -> None:
            shown.visible = True
            _hear_clicks(shown)
            ready()

        try:
            self._icon.run(show)
        except Exception as error:
            if not self._stopped:
                raise NoTray(f"{type(error).__name__}: {error}") from error
            _log.info("the icon went with %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        self._stopped = True
        _on_main_thread(self._icon.stop)

    def show(self, status: Status) -> None:
        _on_main_thread(lambda: self._show(status))

    def _show(self, status: Status) -> None:
        """What the desktop does not take is no reason for the node to end."""
        try:
            self._draw(status)
        except Exception as error:
            _log.warning("the icon does not show this: %s: %s", type(error).__name__, error)

    def _draw(self, status: Status) -> None:
        before, self._status = self._status, status
        picture = icon(status)
        if picture is not self._picture:
            self._icon.icon = self._picture = picture
        if tooltip(status) != tooltip(before):
            self._icon.title = _title(self._icon, status)
        lines = self._menu_lines()
        if lines != self._lines and (_words(status) != _words(before) or time.monotonic() > self._drawn):
            self._lines, self._drawn = lines, time.monotonic() + FIGURES_SECONDS
            self._icon.update_menu()

    def _menu_lines(self) -> tuple[Line, ...]:
        resumable, at_login = self._ask()
        return menu(self._status, resumable=resumable, at_login=at_login, version=self._version)

    def _items(self) -> list[Any]:
        return [self._item(line) for line in self._menu_lines()]

    def _item(self, line: Line) -> Any:
        if line == SEPARATOR:
            return self._pystray.Menu.SEPARATOR
        action = line.action
        if action is None:
            return self._pystray.MenuItem(line.text, None, enabled=False)
        checked = None if line.checked is None else (lambda _: bool(line.checked))
        return self._pystray.MenuItem(
            line.text, lambda: self._perform(action), checked=checked, default=action is Action.PAGE
        )


def _words(status: Status) -> tuple[object, ...]:
    """What of a status is no figure."""
    return status.state, status.reason, status.cluster, status.model, status.layers


def _is_plain(icon: Any) -> bool:
    """Whether it is pystray's plain X11 icon, which has no menu."""
    return type(icon).__module__ == "pystray._xorg"


def _title(icon: Any, status: Status) -> str:
    """The plain icon's is in Latin-1."""
    text = tooltip(status)
    return text.encode("latin-1", "replace").decode("latin-1") if _is_plain(icon) else text


def _hear_clicks(icon: Any) -> None:
    """The plain icon acts on clicks, but does not ask the server for them."""
    if _is_plain(icon):
        x = importlib.import_module("Xlib.X")
        icon._window.change_attributes(event_mask=x.ExposureMask | x.StructureNotifyMask | x.ButtonPressMask)
        icon._display.flush()


def _on_main_thread(call: Callable[[], None]) -> None:
    """AppKit is used from the main thread alone; pystray's other back ends hand over by themselves."""
    if sys.platform == "darwin":
        importlib.import_module("PyObjCTools.AppHelper").callAfter(call)
    else:
        call()
