"""Real processes: the app starts, is one, is seen, and ends by a signal without leaving anything."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trio

from core.testing.fork_server import run_python
from core.trust.link import InviteLink

pytestmark = pytest.mark.unix
ADDRESS = re.compile(r"^status page  (http://127\.0\.0\.1:\d+/\S+/)$", re.MULTILINE)


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


async def again(folder: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`core-node`, to its end, with an invite on standard input. Given one as a word, it begins again as a program."""
    words = ("-m", "node_app", "--folder", str(folder), *options)
    begins_again = options[-1] != "-"
    run = partial(run_python, *words, env=env, stdin=b"127.0.0.1:1\n", imports_anew=begins_again)
    return await trio.to_thread.run_sync(run)


async def test_a_second_start_reaches_the_first_and_tells_its_address(
    started: Any, browser: Any, tmp_path: Path
) -> None:
    async with started(tmp_path, "--headless") as app:
        url = (await app.printed(ADDRESS))[1]
        second = await again(tmp_path, "--headless", "-")
        assert "has the invite" in second.stdout
        assert ADDRESS.findall(second.stdout) == [url]
        async with httpx.AsyncClient(follow_redirects=True) as client:
            assert (await client.get(f"{url}status")).json()["cluster"] == "127.0.0.1:1"
            assert browser.opened() == []
            refused = await again(tmp_path, "nonsense", env=browser.env)
            assert refused.returncode == 2
            assert "that is no invite" in refused.stderr
            shown = await browser.shown()
            assert url not in shown, "whoever reads command lines learns nothing"
            assert (await client.get(shown)).url == url
            assert "that is no invite" in (await client.get(f"{url}status")).json()["notice"]
            link = str(InviteLink(("192.168.1.7",), 7001, bytes(32), bytes(16), 2**31))
            assert (await again(tmp_path, link, env=browser.env)).returncode == 0
            status = (await client.get(f"{url}status")).json()
            assert (status["cluster"], status["offer"]["link"]) == ("127.0.0.1:1", link)
        assert await app.end(signal.SIGTERM) == 0


async def test_a_damaged_link_without_an_icon_is_one_line(forked: None, tmp_path: Path) -> None:
    ended = await again(tmp_path, "--headless", "core://join/AbCd")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "the invite is damaged: it is not whole (copy the whole link, without spaces)\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a tray")
async def test_without_a_desktop_it_says_so_once_and_runs_headless(started: Any, browser: Any, tmp_path: Path) -> None:
    """By a damaged link, too: the page opens, and tells."""
    none = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "DBUS_SESSION_BUS_ADDRESS": ""}
    own = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    async with started(tmp_path, "core://join/AbCd", **none, **own, **browser.env) as app:
        url = (await app.printed(ADDRESS))[1]
        assert app.output.count("There is no tray here") == 1
        assert app.output.count("the invite is damaged") == 1
        assert "core://" not in " ".join(psutil.Process(app.process.pid).cmdline())
        async with httpx.AsyncClient() as client:
            status = (await client.get(f"{url}status")).json()
        assert (status["state"], status["notice"]) == ("not joined", "")
        assert "the invite is damaged" in status["reason"]
        assert (await browser.shown()).endswith("#join")
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
