"""A forked program is a process of its own: files, environment, folder, signals and status are what it was given."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from core.testing.fork_server import Forked, fork_server, open_python, run_python

SECONDS = 300
SAYS = "import os, sys; print(sys.stdin.read(), os.environ['WHAT']); print('err', file=sys.stderr); sys.exit(3)"
IMPORTED = "import sys; print('torch' in sys.modules)"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked here")]


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with fork_server():
        yield


@pytest.mark.parametrize("imports_anew", [False, True])
def test_it_reads_writes_and_ends_as_any_other(imports_anew: bool) -> None:
    done = run_python("-c", SAYS, env={"WHAT": "it"}, stdin=b"in", imports_anew=imports_anew)
    assert (done.returncode, done.stdout, done.stderr) == (3, "in it\n", "err\n")
    assert "WHAT" not in os.environ


def test_it_finds_imported_what_takes_long_to_import() -> None:
    assert run_python("-c", IMPORTED).stdout == "True\n"
    assert run_python("-c", IMPORTED, imports_anew=True).stdout == "False\n"


def test_an_error_is_told_as_ever() -> None:
    done = run_python("-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


async def test_a_module_runs_where_it_is_told_and_whoever_waits_hears_of_its_end(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("import os, time; print(os.getcwd(), __name__, flush=True); time.sleep(1000)")
    with trio.fail_after(SECONDS):
        process = await open_python("-c", "import here", env=dict(os.environ), cwd=tmp_path)
        assert isinstance(process, Forked)
        assert (await process.stdout.receive_some()).decode() == f"{tmp_path} here\n"
        assert process.returncode is None
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(process.wait)
            await trio.testing.wait_all_tasks_blocked()
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)
