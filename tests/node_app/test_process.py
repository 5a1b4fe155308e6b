"""Real processes: the app starts, is one, is seen, and ends by a signal without leaving anything."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

ADDRESS = re.compile(r"^status page  (http://127\.0\.0\.1:\d+/\S+/)$", re.MULTILINE)
APP = [sys.executable, "-m", "node_app"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_its_page_and_ends_by_a_signal(started: Any, tmp_path: Path, number: signal.Signals) -> None:
    async with started(tmp_path, "--headless") as app:
        url = (await app.printed(ADDRESS))[1]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}status")).json()["state"] == "not joined"
        assert await app.end(number) == 0
    assert "Traceback" not in app.output
    assert url.split("/")[3] not in (tmp_path / "logs" / "core-node.log").read_text(), "the token is no log's business"
    assert not (tmp_path / "state" / "app.json").exists()


async def test_a_second_start_reaches_the_first(started: Any, tmp_path: Path) -> None:
    async with started(tmp_path, "--headless") as app:
        url = (await app.printed(ADDRESS))[1]
        second = await trio.run_process(
            [*APP, "--folder", str(tmp_path), "-"], stdin=b"127.0.0.1:1\n", capture_stdout=True, capture_stderr=True
        )
        assert b"it has the invite" in second.stdout
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}status")).json()["cluster"] == "127.0.0.1:1"
        refused = await trio.run_process(
            [*APP, "--folder", str(tmp_path), "nonsense"], check=False, capture_stdout=True, capture_stderr=True
        )
        assert refused.returncode == 2
        assert b"that is no invite" in refused.stderr
        assert await app.end(signal.SIGTERM) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a tray")
async def test_without_a_desktop_it_says_so_once_and_runs_headless(started: Any, tmp_path: Path) -> None:
    own = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "BROWSER": "true %s"}
    async with started(tmp_path, DISPLAY="", WAYLAND_DISPLAY="", DBUS_SESSION_BUS_ADDRESS="", **own) as app:
        await app.printed(ADDRESS)
        assert app.output.count("There is no tray here") == 1
        assert await app.end(signal.SIGTERM) == 0


async def test_it_ends_although_something_hangs(started: Any, tmp_path: Path) -> None:
    hanging = (
        "import time; from node_app import process; process.WATCHDOG_SECONDS = 1.0;"
        "process.App.quit = lambda app: time.sleep(1000)"
    )
    async with started(tmp_path, "--headless", before=hanging) as app:
        await app.printed(ADDRESS)
        assert await app.end(signal.SIGTERM) == 1
    log = (tmp_path / "logs" / "core-node.log").read_text()
    assert "Timeout" in log
    assert "in <lambda>" in log, "where each thread was"


async def test_a_second_signal_ends_it_at_once(started: Any, tmp_path: Path) -> None:
    hanging = "import time; from node_app import process; process.App.quit = lambda app: print('hangs', flush=True)"
    async with started(tmp_path, "--headless", before=hanging) as app:
        await app.printed(ADDRESS)
        app.process.send_signal(signal.SIGINT)
        await app.printed(re.compile("hangs"))
        assert await app.end(signal.SIGINT) == 130
