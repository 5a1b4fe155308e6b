"""The icon on a real X desktop: it is seen, its menu opens, and clicks on it do what its lines say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

pytest.importorskip("PIL", reason="Pillow comes with the extra `tray`")
pytest.importorskip("Xlib", reason="python-xlib comes with pystray on Linux")

from node_app.pictures import COLOURS
from node_app.status import Action, State, Status, menu

SECONDS = 300
PICTURES = "CORE_TEST_PICTURES"
"""The environment's name of a folder for photographs of the desktop."""


async def test_the_icon_is_seen_and_its_menu_is_clicked(
    started: Any, desktop: Any, browser: Any, tmp_path: Path
) -> None:
    with trio.fail_after(SECONDS):
        async with started(tmp_path, **desktop.env, **browser.env) as app:
            icon = await desktop.tray_icon()
            await desktop.until(lambda: seen(desktop, COLOURS[State.NOT_JOINED]))
            [shown] = await desktop.until(browser.opened)
            assert shown.endswith("#join"), "who has not joined is shown where to"

            desktop.click(*icon.middle)
            box = await desktop.menu()
            await keep(desktop, "menu")
            desktop.click(*line(box, Action.PAGE))
            await expect_the_page(await desktop.until(lambda: browser.opened()[1:]))

            await desktop.until(lambda: desktop.open_menu() is None)
            desktop.click(*icon.middle)
            desktop.click(*line(await desktop.menu(), Action.QUIT))
            assert await app.process.wait() == 0
    assert (tmp_path / "data/applications/core-node.desktop").exists(), "core:// links open it"


async def expect_the_page(opened: list[str]) -> None:
    [url] = opened
    async with httpx.AsyncClient(follow_redirects=True) as client:
        assert "Join a cluster" in (await client.get(url)).text


def line(box: Any, action: Action) -> tuple[int, int]:
    """The middle of a menu's line. A separator is a fifth as high as a line, about."""
    lines = menu(Status(), resumable=False, at_login=False, version="0")
    heights = [1.0 if entry.text else 0.2 for entry in lines]
    index = next(i for i, entry in enumerate(lines) if entry.action is action)
    return box.x + box.width // 2, box.y + round(box.height * (sum(heights[:index]) + 0.5) / sum(heights))


def seen(desktop: Any, colour: tuple[int, int, int]) -> bool:
    return any(pixel == colour for _, pixel in desktop.photograph().getcolors(1 << 20))


async def keep(desktop: Any, name: str) -> None:
    """A photograph once the picture stands still, kept where the environment asks for it."""
    photographs = [desktop.photograph().tobytes()]

    def stands_still() -> bool:
        photographs.append(desktop.photograph().tobytes())
        return bool(photographs[-1] == photographs[-2])

    await desktop.until(stands_still)
    if folder := os.environ.get(PICTURES):
        desktop.photograph().save(f"{folder}/{name}.png")
