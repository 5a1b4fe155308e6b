"""What the app asks of the desktop: to start it at login, to open core:// links with it, to show a page.

What would be written is computed for each platform by functions; writing it is little.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError

NAME = "core-node"
TITLE = "core node"
SCHEME = "core"
_IDENTIFIER = "core.node"
_RUN_KEY = r"Software\Microsoft\Windows\CurrentVersion\Run"
_CLASS_KEY = rf"Software\Classes\{SCHEME}"


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class RegistryValue:
    """Below HKEY_CURRENT_USER; `name` "" is the key's default value."""

    key: str
    name: str
    value: str


Entry = File | RegistryValue


def command() -> list[str]:
    """What starts this app again: the frozen program itself, or this Python with this package."""
    return [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-m", "node_app"]


def login_entries() -> list[Entry]:
    """What starts this app at login, here."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return at_login(sys.platform, Path.home(), command(), Path(config) if config else None)


def at_login(platform: str, home: Path, command: Sequence[str], config: Path | None = None) -> list[Entry]:
    """XDG autostart, a LaunchAgent on macOS, the Run key on Windows. `config` is $XDG_CONFIG_HOME, if it is set."""
    if platform == "win32":
        return [RegistryValue(_RUN_KEY, NAME, subprocess.list2cmdline(command))]
    if platform == "darwin":
        agent = {
            "Label": _IDENTIFIER,
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "ProcessType": "Interactive",
        }
        path = home / "Library/LaunchAgents" / f"{_IDENTIFIER}.plist"
        return [File(path, plistlib.dumps(agent).decode())]
    return [File((config or home / ".config") / "autostart" / f"{NAME}.desktop", _desktop_file(command))]


def for_links(platform: str, home: Path, command: Sequence[str], data: Path | None = None) -> list[Entry]:
    """What core:// links open; on macOS the application's plist says it. `data` is $XDG_DATA_HOME, if it is set."""
    if platform == "win32":
        opened = subprocess.list2cmdline(command) + ' "%1"'
        return [
            RegistryValue(_CLASS_KEY, "", f"URL:{TITLE}"),
            RegistryValue(_CLASS_KEY, "URL Protocol", ""),
            RegistryValue(rf"{_CLASS_KEY}\shell\open\command", "", opened),
        ]
    if platform == "darwin":
        return []
    handler = _desktop_file(command, " %u", f"MimeType=x-scheme-handler/{SCHEME};\n")
    return [File((data or home / ".local/share") / "applications" / f"{NAME}.desktop", handler)]


def _desktop_file(command: Sequence[str], arguments: str = "", more: str = "") -> str:
    """By the Desktop Entry Specification."""
    return (
        "[Desktop Entry]\nType=Application\n"
        f"Name={TITLE}\nComment=Lends this machine to a cluster of friends\n"
        f"Exec={' '.join(map(_quoted, command))}{arguments}\n"
        f"Terminal=false\nCategories=Network;\n{more}"
    )


def _quoted(argument: str) -> str:
    """As the Exec key has it: in double quotes, with a percent sign doubled."""
    for character in '\\"`$':
        argument = argument.replace(character, "\\" + character)
    quoted = '"' + argument.replace("%", "%%") + '"'
    return quoted.replace("\\", "\\\\")  # what every value of such a file asks for


def write(entries: Sequence[Entry]) -> None:
    """Raises ConfigError where the desktop does not take them."""
    try:
        for entry in entries:
            if isinstance(entry, File):
                entry.path.parent.mkdir(parents=True, exist_ok=True)
                entry.path.write_text(entry.text, encoding="utf-8")
            else:
                _write_registry(entry)
    except OSError as error:
        raise ConfigError("the desktop's settings can't be written", str(error)) from error


def remove(entries: Sequence[Entry]) -> None:
    try:
        for entry in entries:
            if isinstance(entry, File):
                entry.path.unlink(missing_ok=True)
            else:
                _remove_registry(entry)
    except OSError as error:
        raise ConfigError("the desktop's settings can't be written", str(error)) from error


def present(entries: Sequence[Entry]) -> bool:
    return all(entry.path.exists() if isinstance(entry, File) else _in_registry(entry) for entry in entries)


def browse(url: str) -> bool:
    """Opens the user's browser, which must not inherit that this process blocks signals; False where there is none."""
    if sys.platform == "win32":
        return webbrowser.open(url)
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return webbrowser.open(url)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def announce_links(data: Path) -> None:
    """Tells a Linux desktop to read the link handlers anew, where it has the tools that do it."""
    for asked in (
        ["update-desktop-database", str(data / "applications")],
        ["xdg-mime", "default", f"{NAME}.desktop", f"x-scheme-handler/{SCHEME}"],
    ):
        if shutil.which(asked[0]):
            subprocess.run(asked, capture_output=True, timeout=10, check=False)


def _write_registry(entry: RegistryValue) -> None:
    if sys.platform == "win32":
        import winreg

        with winreg.CreateKey(winreg.HKEY_CURRENT_USER, entry.key) as key:
            winreg.SetValueEx(key, entry.name, 0, winreg.REG_SZ, entry.value)


def _remove_registry(entry: RegistryValue) -> None:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_CURRENT_USER, entry.key, 0, winreg.KEY_SET_VALUE) as key:
                winreg.DeleteValue(key, entry.name)
        except FileNotFoundError:
            return


def _in_registry(entry: RegistryValue) -> bool:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_CURRENT_USER, entry.key) as key:
                return bool(winreg.QueryValueEx(key, entry.name)[0] == entry.value)
        except FileNotFoundError:
            return False
    return False
