"""What the app does at its user's word alone: follow a link, give up a Resume, end, start at login."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.trust.link import InviteLink
from core.trust.state_dir import StateDir
from node_app.app import App
from node_app.files import Folders
from node_app.joining import Offer, Target
from node_app.pause_policy import SERVE, Measurements
from node_app.settings import Limits, SettingsFile

LINK = str(InviteLink(("192.168.1.7",), 7001, bytes(32), bytes(16), 2**31))
INVITED = Target("192.168.1.7", 7001, invited=True)
HERE = Target("127.0.0.1", 1)


@pytest.fixture
def app(tmp_path: Path) -> App:
    folders = Folders.under(tmp_path)
    state = StateDir.open(folders.state)
    return App(SettingsFile(folders.config / "settings.json"), state, folders.logs / "log", "1.2.3")


async def test_a_link_that_was_opened_changes_nothing_before_its_user_says_so(app: App) -> None:
    app.join("127.0.0.1:1")
    app.follow(LINK)
    assert (app.settings.joined, app.offer) == (HERE, Offer(LINK, "192.168.1.7:7001", "aaaaaaaa"))
    with pytest.raises(ConfigError, match="the invite is damaged"):
        app.follow(LINK[:-1])
    assert (app.settings.joined, app.offer) == (HERE, None)
    assert "the invite is damaged" in app.notice
    app.follow(LINK)
    app.dismiss_offer()
    assert (app.offer, app.notice) == (None, "")
    app.follow(LINK)
    app.join(LINK)
    assert (app.settings.joined, app.offer) == (INVITED, None)


async def test_what_no_browser_opens_is_joined(app: App) -> None:
    app.follow("127.0.0.1:1")
    assert (app.settings.joined, app.offer) == (HERE, None)


async def test_saving_a_limit_does_not_undo_a_resume(app: App) -> None:
    limits = Limits(cpu_percent=50, pause_on_battery=False, free_memory_gb=None)
    app._measured = Measurements(cpu=90.0)
    app.change_limits(limits)
    assert "other programs use the CPU" in app._verdict.reason
    app.resume()
    assert app._verdict.reason == ""
    app.change_limits(replace(limits, threads=2))
    assert app._verdict.reason == ""
    app._verdict = SERVE
    app.change_limits(replace(limits, threads=3))
    assert app._verdict.reason != ""


def test_the_page_ends_the_process_once(app: App) -> None:
    ended: list[str] = []
    app.end_process = lambda: ended.append("ended")
    app.end()
    app.end()
    assert ended == ["ended"]


def test_the_page_has_it_start_at_login(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for wanted in (True, False):
        app.start_at_login(wanted)
        assert app.starts_at_login is wanted
