"""Real processes: the app starts, is one, is seen, and ends by a signal without leaving anything."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

SECONDS = 60
END_SECONDS = 20
ADDRESS = re.compile(r"^status page  (http://127\.0\.0\.1:\d+/\S+/)$", re.MULTILINE)
APP = [sys.executable, "-m", "node_app"]


class Started:
    """`core-node` as a process; `output` is what it has printed so far."""

    def __init__(self, process: trio.Process) -> None:
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
        with trio.fail_after(END_SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def started(folder: Path, *options: str, **env: str) -> AsyncIterator[Started]:
    command = [*APP, "--folder", str(folder), *options]
    with trio.fail_after(SECONDS):
        process = await trio.lowlevel.open_process(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
        try:
            yield Started(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_its_page_and_ends_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    async with started(tmp_path, "--headless") as app:
        url = (await app.printed(ADDRESS))[1]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}status")).json()["state"] == "not joined"
        assert await app.end(number) == 0
    assert "Traceback" not in app.output
    assert url.split("/")[3] not in (tmp_path / "logs" / "core-node.log").read_text(), "the token is no log's business"
    assert not (tmp_path / "state" / "app.json").exists()


async def test_a_second_start_reaches_the_first(tmp_path: Path) -> None:
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
async def test_without_a_desktop_it_says_so_once_and_runs_headless(tmp_path: Path) -> None:
    own = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "BROWSER": "true %s"}
    async with started(tmp_path, DISPLAY="", WAYLAND_DISPLAY="", DBUS_SESSION_BUS_ADDRESS="", **own) as app:
        await app.printed(ADDRESS)
        assert app.output.count("There is no tray here") == 1
        assert await app.end(signal.SIGTERM) == 0


async def test_it_ends_although_something_hangs(tmp_path: Path) -> None:
    """The watchdog's time is shortened, and the tick is made to hang in a thread that trio waits for."""
    script = (
        "import sys, threading, time; from node_app import app, main, process; process.WATCHDOG_SECONDS = 1.0;"
        "process.App.quit = lambda self: time.sleep(1000);"
        f"sys.argv = ['core-node', '--headless', '--folder', {str(tmp_path)!r}]; main.main()"
    )
    with trio.fail_after(SECONDS):
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        app = Started(process)
        await app.printed(ADDRESS)
        assert await app.end(signal.SIGTERM) == 1
    log = (tmp_path / "logs" / "core-node.log").read_text()
    assert "Timeout" in log
    assert "time.sleep" in log or "in <lambda>" in log
