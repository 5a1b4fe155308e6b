"""What would be written on each platform, and that Linux's part is written and taken away."""

from __future__ import annotations

import configparser
import plistlib
from pathlib import Path

import pytest

from node_app.desktop import File, RegistryValue, at_login, for_links, present, remove, write

HOME = Path("/somewhere")
COMMAND = ['/opt/my "apps"/core', "-m", "node_app", "100%"]


def desktop_entry(text: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser["Desktop Entry"]


def test_linux_starts_it_by_xdg_autostart() -> None:
    [entry] = at_login("linux", HOME, COMMAND)
    assert isinstance(entry, File)
    assert entry.path == HOME / ".config/autostart/core-node.desktop"
    assert desktop_entry(entry.text)["Type"] == "Application"
    assert desktop_entry(entry.text)["Exec"] == r'"/opt/my \\"apps\\"/core" "-m" "node_app" "100%%"'
    [elsewhere] = at_login("linux", HOME, COMMAND, HOME / "cfg")
    assert isinstance(elsewhere, File)
    assert elsewhere.path == HOME / "cfg/autostart/core-node.desktop"


def test_macos_starts_it_by_a_launch_agent() -> None:
    [entry] = at_login("darwin", HOME, COMMAND)
    assert isinstance(entry, File)
    assert entry.path == HOME / "Library/LaunchAgents/core.node.plist"
    agent = plistlib.loads(entry.text.encode())
    assert (agent["ProgramArguments"], agent["RunAtLoad"]) == (COMMAND, True)


def test_windows_starts_it_by_the_run_key() -> None:
    [entry] = at_login("win32", HOME, [r"C:\Program Files\core\core-node.exe"])
    assert entry == RegistryValue(
        r"Software\Microsoft\Windows\CurrentVersion\Run", "core-node", r'"C:\Program Files\core\core-node.exe"'
    )


def test_links_open_it_on_linux() -> None:
    [entry] = for_links("linux", HOME, ["/opt/core-node"])
    assert isinstance(entry, File)
    assert entry.path == HOME / ".local/share/applications/core-node.desktop"
    assert desktop_entry(entry.text)["Exec"] == '"/opt/core-node" %u'
    assert desktop_entry(entry.text)["MimeType"] == "x-scheme-handler/core;"


def test_links_open_it_on_windows() -> None:
    values = for_links("win32", HOME, ["core-node.exe"])
    assert RegistryValue(r"Software\Classes\core", "URL Protocol", "") in values
    assert RegistryValue(r"Software\Classes\core\shell\open\command", "", 'core-node.exe "%1"') in values


def test_on_macos_the_bundle_says_what_links_open() -> None:
    assert for_links("darwin", HOME, COMMAND) == []


@pytest.mark.parametrize("entries", [at_login, for_links])
def test_what_is_written_can_be_taken_away(tmp_path: Path, entries: object) -> None:
    assert callable(entries)
    written = entries("linux", tmp_path, COMMAND)
    assert not present(written)
    write(written)
    assert present(written)
    remove(written)
    assert not present(written)
    remove(written)
