"""`core-node` as a process; and a desktop: an X server without a screen, a session bus, a bar with a tray, a mouse.

From Debian: xvfb, trayer, dbus, python3-gi, gir1.2-gtk-3.0, gir1.2-ayatanaappindicator3-0.1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio

from core.testing.fork_server import Forked, fork_server, open_python

if TYPE_CHECKING:
    from PIL import Image

SECONDS = 300
END_SECONDS = 20
FOUND_SECONDS = 300
POLL_SECONDS = 0.05
PROGRAMS = ("Xvfb", "trayer", "dbus-daemon")
BAR_HEIGHT = 32
ICON_WIDTH = 20
SCREEN = (900, 480)
_SYSTEM_GI = Path("/usr/lib/python3/dist-packages/gi")
_NEEDS_GI = (
    "import gi; gi.require_version('Gtk', '3.0'); gi.require_version('AyatanaAppIndicator3', '0.1');"
    "from gi.repository import AyatanaAppIndicator3"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Box:
    x: int
    y: int
    width: int
    height: int

    @property
    def middle(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height // 2


def what_is_missing(folder: Path) -> str:
    """Why there can be no such desktop here; "" where there can. `folder` gets a way to GTK's bindings."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        return f"no {', '.join(missing)} here"
    asked = subprocess.run(
        [sys.executable, "-c", _NEEDS_GI], env=with_gi(folder), capture_output=True, text=True, timeout=300, check=False
    )
    return "" if asked.returncode == 0 else f"this Python has no GTK: {asked.stderr.strip().splitlines()[-1]}"


def with_gi(folder: Path) -> dict[str, str]:
    """An environment in which Python finds the system's GTK bindings, and nothing else of the system's."""
    if _SYSTEM_GI.is_dir() and not (folder / "gi").exists():
        (folder / "gi").symlink_to(_SYSTEM_GI)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    return {**os.environ, "PYTHONPATH": path}


async def until(look: Callable[[], T | None]) -> T:
    """What `look` finds, once it finds anything. Raises AssertionError where it doesn't in time."""
    deadline = trio.current_time() + FOUND_SECONDS
    while not (found := look()):
        assert trio.current_time() < deadline, "it did not come to be seen"
        await trio.sleep(POLL_SECONDS)
    return found


class Desktop:
    def __init__(self, display: str, bus: str, folder: Path) -> None:
        self.env = {
            **with_gi(folder),
            "DISPLAY": display,
            "DBUS_SESSION_BUS_ADDRESS": bus,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_DATA_HOME": str(folder / "data"),
            "NO_AT_BRIDGE": "1",
            "GTK_THEME": "Adwaita:dark",
        }
        from Xlib.display import Display

        self._display = Display(display)
        self._root = self._display.screen().root

    async def tray_icon(self) -> Box:
        """The bar has the width of its icons."""
        return await self.until(lambda: next((b for b in self._boxes(override=False) if b.width >= ICON_WIDTH), None))

    async def menu(self) -> Box:
        """The one that is open."""
        return await self.until(self.open_menu)

    def open_menu(self) -> Box | None:
        return next((box for box in self._boxes(override=True) if box.height > 100), None)

    async def until(self, look: Callable[[], T | None]) -> T:
        return await until(look)

    def click(self, x: int, y: int) -> None:
        from Xlib import X
        from Xlib.ext import xtest

        xtest.fake_input(self._display, X.MotionNotify, x=x, y=y)
        for kind in (X.ButtonPress, X.ButtonRelease):
            xtest.fake_input(self._display, kind, 1)
        self._display.sync()

    def photograph(self) -> Image.Image:
        from PIL import Image
        from Xlib import X

        raw = self._root.get_image(0, 0, *SCREEN, X.ZPixmap, 0xFFFFFFFF)
        return Image.frombytes("RGB", SCREEN, raw.data, "raw", "BGRX")

    def _boxes(self, *, override: bool) -> list[Box]:
        """The windows that are to be seen; those with `override` no window manager would touch: menus, for instance."""
        from Xlib import X

        found = []
        for window in self._root.query_tree().children:
            attributes, shape = window.get_attributes(), window.get_geometry()
            if attributes.map_state == X.IsViewable and bool(attributes.override_redirect) is override:
                found.append(Box(shape.x, shape.y, shape.width, shape.height))
        return found


class Started:
    """`core-node` as a process; `output` is what it has printed so far."""

    def __init__(self, process: trio.Process | Forked) -> None:
        self.process = process
        self.output = ""

    async def printed(self, pattern: re.Pattern[str]) -> re.Match[str]:
        assert self.process.stdout is not None
        while not (found := pattern.search(self.output)):
            chunk = await self.process.stdout.receive_some()
            assert chunk, f"it ended, and printed only: {self.output}"
            self.output += chunk.decode()
        return found

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        with trio.fail_after(SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def _started(folder: Path, *options: str, before: str = "", **env: str) -> AsyncIterator[Started]:
    main = f"{before}\nfrom node_app.main import main; main()"
    with trio.fail_after(SECONDS):
        process = await open_python(
            "-c",
            main,
            "--folder",
            folder,
            *options,
            env={**os.environ, **env},
            imports_anew="PYTHONPATH" in env or any(option.startswith("core://") for option in options),
        )
        try:
            yield Started(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture(scope="session")
def forked() -> Iterator[None]:
    with fork_server():
        yield


@pytest.fixture
def started(forked: None) -> Callable[..., AbstractAsyncContextManager[Started]]:
    """`core-node` with its files below a folder, more options, and more of an environment; `before` it Python code."""
    return _started


class Browser:
    """A program that notes the addresses which it is to open."""

    def __init__(self, folder: Path) -> None:
        self._opened = folder / "opened"
        program = folder / "browser"
        program.write_text(f'#!/bin/sh\necho "$1" >> {self._opened}\n')
        program.chmod(0o700)
        self.env = {"BROWSER": f"{program} %s"}

    async def shown(self) -> str:
        """The first of them, once there is one."""
        return (await until(self.opened))[0]

    def opened(self) -> list[str]:
        return self._opened.read_text().splitlines() if self._opened.exists() else []


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    """Skips the test where this machine has none to offer."""
    if reason := what_is_missing(tmp_path):
        pytest.skip(reason)
    async with open_desktop(tmp_path) as desktop:
        yield desktop


@asynccontextmanager
async def open_desktop(folder: Path) -> AsyncIterator[Desktop]:
    """For the length of the block. May be cut short by a deadline of the caller's."""
    read, write = os.pipe()
    display, screen = f":{100 + os.getpid() % 50_000}", "{}x{}x24".format(*SCREEN)
    async with _running(["Xvfb", display, "-displayfd", str(write), "-screen", "0", screen], pass_fds=[write]):
        os.close(write)
        async with trio.lowlevel.FdStream(read) as ready:
            assert [part async for part in ready], "Xvfb did not start"
        bus = ["dbus-daemon", "--session", "--nofork", "--print-address"]
        async with _running(bus, stdout=subprocess.PIPE) as daemon:
            assert daemon.stdout is not None
            address = (await daemon.stdout.receive_some()).decode().strip()
            bar = ["trayer", "--edge", "top", "--align", "right", "--widthtype", "request"]
            bar += ["--height", str(BAR_HEIGHT), "--tint", "0x222226", "--alpha", "0", "--transparent", "true"]
            async with _running(bar, env={**os.environ, "DISPLAY": display, "NO_AT_BRIDGE": "1"}):
                yield Desktop(display, address, folder)


@asynccontextmanager
async def _running(command: list[str], **options: Any) -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(command, stderr=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(END_SECONDS):
                await process.wait()
            process.kill()
