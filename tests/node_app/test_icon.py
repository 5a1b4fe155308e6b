"""The icon without a desktop: what is set on it, and what becomes of a desktop that does not take it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL", reason="Pillow comes with the extra `tray`")

from node_app.status import State, Status
from node_app.tray import Tray

ODD = Status(State.ERROR, "desk", reason="нет устройства")


class Icon:
    def __init__(self, name: str, icon: object, title: str, menu: object) -> None:
        self.icon, self.title, self.drawn = icon, title, 0

    def update_menu(self) -> None:
        self.drawn += 1


class PlainIcon(Icon):
    __module__ = "pystray._xorg"


class DeafIcon(Icon):
    def update_menu(self) -> None:
        raise RuntimeError("the bus is gone")


def tray(monkeypatch: pytest.MonkeyPatch, kind: type[Icon]) -> tuple[Tray, Any]:
    monkeypatch.setitem(sys.modules, "pystray", SimpleNamespace(Icon=kind, Menu=lambda items: items))
    monkeypatch.setattr("node_app.tray._on_main_thread", lambda call: call())
    tray = Tray(lambda action: None, lambda: (False, False), "1.2.3")
    return tray, tray._icon


def test_each_status_has_its_picture_title_and_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, icon = tray(monkeypatch, Icon)
    before = icon.icon
    shown.show(ODD)
    assert icon.icon is not before
    assert icon.title == "core · Something went wrong: нет устройства"
    assert icon.drawn == 1
    shown.show(ODD)
    assert icon.drawn == 1, "an open menu is left alone"


def test_the_plain_icon_is_given_what_it_can_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, icon = tray(monkeypatch, PlainIcon)
    shown.show(ODD)
    assert icon.title == "core · Something went wrong: ??? ??????????"


def test_a_desktop_that_takes_nothing_costs_the_node_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown, _ = tray(monkeypatch, DeafIcon)
    shown.show(ODD)
    assert "the bus is gone" in caplog.text
