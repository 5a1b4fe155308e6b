"""Python programs of tests that need not import torch: each is forked from a process which has imported all of it.

    with fork_server():
        done = run_python("-m", "core", "plugins")
        assert done.returncode == 0

Linux alone forks so. Elsewhere, and while no server is open, a program is an ordinary process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import trio

from core.plugins import GROUP
from core.testing.hosts import Host, enter

_IMPORTED = (
    "core.cli.serve",
    "core.coordinator.live",
    "core.gateway.server",
    "core.node.agent",
    "core.testing.fork_server",
    "node_app.process",
    "transformers.models.auto.tokenization_auto",
)
_SECONDS = 300.0
_STATUS = threading.Lock()
"""Held by who reads how programs have ended: multiprocessing does when it starts one, and each is told once."""
_is_open = False


@contextmanager
def fork_server() -> Iterator[None]:
    """Programs are forked in the block. The process that they are forked from ends with this one."""
    global _is_open
    if sys.platform != "linux" or _is_open:
        yield
        return
    plugins = [entry.module for entry in entry_points(group=GROUP)]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_IMPORTED, *plugins])
    _is_open = True
    try:
        run_python("-c", "").check_returncode()
        yield
    finally:
        _is_open = False


class Forked:
    """A forked program, with what tests use of trio.Process."""

    def __init__(self, process: BaseProcess, stdout: trio.abc.ReceiveStream) -> None:
        self.stdout = stdout
        self._process = process
        self._waiting = trio.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As subprocess gives it: None while it runs, negative where a signal ended it."""
        with _STATUS:
            return self._process.exitcode

    async def wait(self) -> int:
        async with self._waiting:
            if self.returncode is None:
                await trio.lowlevel.wait_readable(self._process.sentinel)
        status = self.returncode
        assert status is not None
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


async def open_python(
    *arguments: str | Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: bytes = b"",
    host: Host | None = None,
    imports_anew: bool = False,
) -> trio.Process | Forked:
    """Starts `python arguments`, on `host` where one is given. Its output, standard error included, is in `stdout`.

    `imports_anew`: an ordinary process, since `env` changes what is imported, or what is read at an import.
    """
    words = list(map(str, arguments))
    if sys.platform != "linux" or not _is_open or imports_anew:
        command = [sys.executable, *words] if host is None else host.command(sys.executable, *words)
        process: trio.Process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd, env=env
        )
        assert process.stdin is not None
        await process.stdin.send_all(stdin)
        await process.stdin.aclose()
        return process
    read, write = os.pipe()
    try:
        forked = await trio.to_thread.run_sync(_start, words, env, cwd, stdin, write, write, host)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return Forked(forked, trio.lowlevel.FdStream(read))


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", imports_anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments` to its end, with what `env` adds to the environment. `imports_anew` as above."""
    environment = {**os.environ, **(env or {})}
    if not _is_open or imports_anew:
        command, text = [sys.executable, *arguments], stdin.decode()
        return subprocess.run(
            command, capture_output=True, text=True, input=text, timeout=_SECONDS, check=False, env=environment
        )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _start([*arguments], environment, None, stdin, out.fileno(), err.fileno())
        process.join(_SECONDS)
        status = process.exitcode
        if status is None:
            process.kill()
            raise subprocess.TimeoutExpired([*arguments], _SECONDS)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([*arguments], status, *texts)


def _start(
    words: list[str],
    env: Mapping[str, str],
    cwd: Path | None,
    stdin: bytes,
    out: int,
    err: int,
    host: Host | None = None,
) -> BaseProcess:
    """`out` and `err` are files of this process, which keeps them."""
    if sys.platform != "linux":
        raise OSError("nothing is forked here")
    with tempfile.TemporaryFile() as text:
        text.write(stdin)
        text.seek(0)
        files = [Connection(os.dup(file)) for file in (text.fileno(), out, err)]
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(words, dict(env), cwd or Path.cwd(), files, None if host is None else host.namespace)
    )
    with _STATUS:
        process.start()
    for file in files:
        file.close()
    return process


def _run(words: list[str], env: dict[str, str], cwd: Path, files: list[Connection], namespace: Path | None) -> None:
    """In the forked process. Its exit status is that of SystemExit, as ever."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    if namespace is not None:
        enter(namespace)
    kind, what, *sys.argv[1:] = words
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c", f"python {kind} is not forked"
        exec(what, {"__name__": "__main__"})
