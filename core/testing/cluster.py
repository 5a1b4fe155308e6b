"""A cluster of real processes on this machine, for tests: one `core serve` and any number of `core node`.

In a test:

    async with open_cluster(tiny_checkpoint(tmp_path), local_nodes=2) as cluster:
        await cluster.wait_ready()
        async with cluster.client() as client:
            await client.post("/v1/completions", json={"model": cluster.model, "prompt": "Hello"})
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio

from core.testing.fork_server import Forked, open_python

COORDINATOR = "coordinator"
"""The name under which the `core serve` process goes."""
START_SECONDS = 900.0
END_SECONDS = 120.0
"""How long processes that were asked to end may take before they are killed, and the cluster fails."""
POLL_SECONDS = 0.05
REQUEST_SECONDS = 900.0
_MARK = "CORE_TEST_CLUSTER"
_ADDRESS = re.compile(r"^API +http://127\.0\.0\.1:(\d+)/v1\nnodes join +[\d.]+:(\d+)$", re.MULTILINE)


class Program:
    """A `core` process. `output` is what it has printed so far, standard error included."""

    def __init__(self, name: str, process: trio.Process | Forked) -> None:
        self.name = name
        self.process = process
        self._output = bytearray()
        self._ended = False

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    async def read(self) -> None:
        """Collects the output until the end, the process's and that of its children."""
        assert self.process.stdout is not None
        async for chunk in self.process.stdout:
            self._output += chunk
        self._ended = True

    async def printed(self, pattern: str | re.Pattern[str], timeout: float = START_SECONDS) -> re.Match[str]:
        """The first match of `pattern` in the output. Raises AssertionError where it does not come in time."""
        deadline = trio.current_time() + timeout
        while not (found := re.search(pattern, self.output)):
            if self._ended or trio.current_time() > deadline:
                raise AssertionError(f"{self.name} printed nothing like {pattern!r}")
            await trio.sleep(POLL_SECONDS)
        return found

    async def wait(self, timeout: float = END_SECONDS) -> int:
        """The exit status. Raises AssertionError where it does not end in time."""
        with trio.move_on_after(timeout):
            return await self.process.wait()
        raise AssertionError(f"{self.name} did not end within {timeout:g} s")

    def __str__(self) -> str:
        status = self.process.returncode
        return f"{self.name} ({'running' if status is None else f'ended with {status}'}):\n{self.output}"


@dataclass(slots=True)
class Cluster:
    """Made by `open_cluster`. What talks to the API may be called in any trio loop; processes belong to the opener's.

    `model` is the name that the API knows `source` by. `programs` are all that were started here, also those that
    have ended; a coordinator's local nodes print into its output.
    """

    source: str
    model: str = "tested"
    url: str = ""
    node_port: int = 0
    programs: list[Program] = field(default_factory=list)
    _nursery: trio.Nursery | None = None
    _mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _serve: tuple[str, ...] = ()
    _env: Mapping[str, str] = field(default_factory=dict)
    _cwd: Path | None = None

    @property
    def api(self) -> str:
        """The base URL of an OpenAI client."""
        return f"{self.url}/v1"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=REQUEST_SECONDS)

    async def status(self) -> dict[str, Any]:
        """What /v1/cluster says."""
        return await self.wait_until(lambda _: True)

    async def wait_until(
        self, condition: Callable[[dict[str, Any]], bool], timeout: float = START_SECONDS
    ) -> dict[str, Any]:
        """The first status that meets `condition`. Raises AssertionError with the last one where none does in time."""
        answer = await self._ask("/v1/cluster", lambda answer: condition(answer.raise_for_status().json()), timeout)
        return dict(answer.json())

    async def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Until /health answers 200. Raises AssertionError with its last answer where it doesn't in time."""
        await self._ask("/health", lambda answer: answer.status_code == 200, timeout)

    async def start_coordinator(self) -> Program:
        """Starts `core serve`; again, after it has ended, on the same ports."""
        options = list(self._serve)
        if self.url:
            options += ["--api-port", self.url.rpartition(":")[2], "--node-port", str(self.node_port)]
        program = await self.start_program(
            COORDINATOR, "-m", "core", "serve", "--model", self.source, "--served-model-name", self.model, *options
        )
        api_port, node_port = (await program.printed(_ADDRESS)).groups()
        self.url, self.node_port = f"http://127.0.0.1:{api_port}", int(node_port)
        return program

    async def start_node(self, name: str, *options: str, cwd: Path | None = None) -> Program:
        """Starts `core node` as a process that joins this cluster. It need not have joined yet."""
        joining = ("--node-id", name, "--cluster-port", str(self.node_port), "--threads", "1")
        return await self.start_program(name, "-m", "core", "node", *joining, *options, cwd=cwd)

    async def kill(self, name: str) -> None:
        """Ends a node, also one that the coordinator started itself, or the coordinator: at once, and unasked."""
        (await trio.to_thread.run_sync(self.processes))[name].kill()

    async def send_signal(self, name: str, number: signal.Signals) -> None:
        (await trio.to_thread.run_sync(self.processes))[name].send_signal(number)

    def processes(self) -> dict[str, psutil.Process]:
        """All processes of this cluster that run now, by name; whoever started them, and whoever has orphaned them."""
        found = {}
        for program in self.programs:
            with suppress(psutil.Error):
                if program.process.returncode is None:
                    found[program.name] = psutil.Process(program.process.pid)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    found[_name(process)] = process
        return found

    def describe(self) -> str:
        """What every program printed."""
        return "\n".join(map(str, self.programs))

    async def _ask(self, path: str, wanted: Callable[[httpx.Response], bool], timeout: float) -> httpx.Response:
        deadline = trio.current_time() + timeout
        try:
            async with self.client() as client:
                while not wanted(answer := await client.get(path)):
                    if trio.current_time() > deadline:
                        raise AssertionError(f"not what was waited for within {timeout:g} s: {answer.text}")
                    await trio.sleep(POLL_SECONDS)
        except httpx.TransportError as error:
            raise AssertionError(f"{self.url} does not answer: {error!r}") from error
        return answer

    async def start_program(self, name: str, *arguments: str | Path, cwd: Path | None = None) -> Program:
        """Starts `python arguments` as a process of this cluster; one that is a node says so by `--node-id NAME`."""
        assert self._nursery is not None
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env, _MARK: self._mark}
        process = await open_python(*arguments, env=env, cwd=cwd or self._cwd, imports_anew=bool(self._env))
        program = Program(name, process)
        self.programs.append(program)
        self._nursery.start_soon(program.read)
        return program

    async def _end(self) -> None:
        """Asks every program to end. Raises AssertionError, after killing what is left, where anything is."""
        running = [program for program in self.programs if program.process.returncode is None]
        with trio.move_on_after(END_SECONDS):
            for program in running:
                program.process.terminate()
            for program in running:
                await program.process.wait()
        late = [program for program in running if program.process.returncode is None]
        for program in late:
            program.process.kill()
            await program.process.wait()
        orphans = await trio.to_thread.run_sync(self.processes)
        _, left = await trio.to_thread.run_sync(psutil.wait_procs, orphans.values(), END_SECONDS)
        for orphan in left:
            orphan.kill()
        names = [program.name for program in late] + [name for name, process in orphans.items() if process in left]
        assert not names, f"these processes had to be killed: {sorted(names)}"


@asynccontextmanager
async def open_cluster(
    model: str | Path,
    *options: str,
    local_nodes: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[Cluster]:
    """A coordinator that serves `model` with `local_nodes` of its own, for the length of the block.

    `options` go to `core serve`; `env` adds to every process's environment, and `cwd` is where they run. The cluster
    need not be ready yet: see `wait_ready`. However the block ends, all processes have ended after it; AssertionError
    where one had to be killed. What they printed is a note on whatever is raised.
    """
    own = ("--node-port", "0", "--api-port", "0", "--threads", "1", "--local-nodes", str(local_nodes))
    cluster = Cluster(str(model), _serve=(*own, *options), _env=env or {}, _cwd=cwd)
    failure: BaseException | None = None
    async with trio.open_nursery() as cluster._nursery:
        try:
            await cluster.start_coordinator()
            yield cluster
        except BaseException as error:
            failure = error  # raised outside, for the nursery would wrap it in a group
        try:
            with trio.CancelScope(shield=True):
                await cluster._end()
        except AssertionError as error:
            failure = failure or error
        cluster._nursery.cancel_scope.deadline = trio.current_time() + 1  # for last words
    if failure is not None:
        failure.add_note(cluster.describe())
        raise failure


def _name(process: psutil.Process) -> str:
    command: list[str] = process.cmdline()
    if "--node-id" in command:
        return command[command.index("--node-id") + 1]
    return COORDINATOR if "serve" in command else f"process {process.pid}"
