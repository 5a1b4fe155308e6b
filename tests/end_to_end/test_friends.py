"""Friends on machines of their own: invited, encrypted, turned out. Needs network namespaces, and root for those."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from core.testing.cluster import Program
from core.testing.fork_server import open_python
from core.testing.hosts import Host, Network, can_have_hosts, open_hosts
from core.trust.link import InviteLink

SECONDS = 300
PORT = 7001
PROMPT = "Whoever listens on the way must not read this"
TOKENS = 24
LONG = 400
PLAIN = [b"HELLO", b"ASSIGNMENT", b"RUN_PREFILL", b"RUN_DECODE", b"HIDDEN_STATE", b"link_token", b"Upgrade", b"GET /"]
"""Stands in whatever is sent without encryption: the names of messages and fields, and the websocket's request."""
ASK = """
import json, sys, urllib.request
body = {{"model": "tiny", "prompt": {prompt!r}, "max_tokens": {tokens}, "temperature": 0}}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {{"Content-Type": "application/json"}}
)
print(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["text"], end="")
"""
STREAM = """
import json, sys, urllib.request
body = {{"model": "tiny", "prompt": {prompt!r}, "max_tokens": {tokens}, "temperature": 0, "ignore_eos": True}}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions",
    json.dumps({{**body, "stream": True}}).encode(),
    {{"Content-Type": "application/json"}},
)
for line in urllib.request.urlopen(request, timeout=300):
    if line.startswith(b"data: {{"):
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            print(json.dumps(choice["text"]), flush=True)
"""
STRANGER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7001), timeout=300) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\nUpgrade: websocket\\r\\n\\r\\n")
    while stranger.recv(4096):
        pass
"""

pytestmark = pytest.mark.skipif(not can_have_hosts(), reason="network namespaces can't be made here")


class Friends:
    """`core` processes, each on a host of its own with a state directory of its own."""

    def __init__(self, network: Network, folder: Path, nursery: trio.Nursery) -> None:
        self.network = network
        self._folder = folder
        self._nursery = nursery
        self.programs: list[Program] = []

    def state(self, host: Host) -> Path:
        return self._folder / host.name

    async def start(self, host: Host, *words: str, stdin: str = "", state: Path | None = None) -> Program:
        return await self._run(host, "-m", "core", *words, stdin=stdin, state=state)

    async def stream(self, tokens: int) -> Program:
        """On the host: what comes is printed as JSON strings, one a line."""
        return await self._run(self.network.hosts[0], "-c", STREAM.format(prompt=PROMPT, tokens=tokens))

    async def _run(self, host: Host, *words: str, stdin: str = "", state: Path | None = None) -> Program:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CORE_STATE_DIR": str(state or self.state(host))}
        process = await open_python(*words, env=env, stdin=stdin.encode(), host=host)
        program = Program(" ".join(words[2:3]), process)
        self.programs.append(program)
        self._nursery.start_soon(program.read)
        return program

    async def serve(self, model: Path, *options: str) -> Program:
        fixed = ("--served-model-name", "tiny", "--node-host", "0.0.0.0", "--local-nodes", "0", "--threads", "1")
        program = await self.start(
            self.network.hosts[0], "serve", "--model", str(model), "--dtype", "fp32", *fixed, *options
        )
        await program.printed(r"nodes join +0\.0\.0\.0:7001")
        return program

    async def invite(self, name: str) -> str:
        return (await self.said(self.network.hosts[0], "invite", "--name", name)).splitlines()[0]

    async def join(self, host: Host, link: str, state: Path | None = None) -> Program:
        return await self.start(host, "node", "--join", "-", "--threads", "1", stdin=f"{link}\n", state=state)

    async def said(self, host: Host, *words: str) -> str:
        program = await self.start(host, *words)
        assert await program.wait() == 0, str(program)
        return program.output

    async def ask(self) -> str:
        script = ASK.format(prompt=PROMPT, tokens=TOKENS)
        return await self.python(self.network.hosts[0], script)

    async def python(self, host: Host, script: str, *arguments: str) -> str:
        command: Sequence[str] = host.command(sys.executable, "-c", script, *arguments)
        return (await trio.run_process(command, capture_stdout=True)).stdout.decode()

    async def end(self) -> None:
        for program in self.programs:
            if program.process.returncode is None:
                program.process.terminate()
        for program in self.programs:
            await program.wait()


@asynccontextmanager
async def friends(count: int, folder: Path) -> AsyncIterator[Friends]:
    with trio.fail_after(SECONDS):
        async with open_hosts(count) as network, trio.open_nursery() as nursery:
            group = Friends(network, folder, nursery)
            try:
                yield group
            except BaseException as error:
                error.add_note("\n".join(map(str, group.programs)))
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await group.end()
            nursery.cancel_scope.cancel()


async def test_friends_serve_together_and_nobody_else_learns_a_thing(model: Path, oracle: Any, tmp_path: Path) -> None:
    async with friends(4, tmp_path) as group:
        host, anna, bert, eve = group.network.hosts
        serve = await group.serve(model, "--min-nodes", "2")
        links = {friend: await group.invite(friend) for friend in ("anna", "bert")}
        first = await group.join(anna, links["anna"])
        second = await group.join(bert, links["bert"])
        await serve.printed("route 1 is ready")
        await serve.printed("on cpu, link direct")
        oracle.check(await group.ask(), oracle.encode(PROMPT), TOKENS)
        secrets = [InviteLink.parse(link).secret for link in links.values()]
        for plain in [*PLAIN, *secrets, PROMPT.encode(), b"anna"]:
            assert plain not in group.network.seen
        assert len(group.network.seen) > 100_000, "the tap hears what passes"

        late = await group.join(eve, links["anna"])
        assert await late.wait() == 1
        assert "used already" in late.output

        wrong = InviteLink.parse(await group.invite("eve"))
        impostor = InviteLink(wrong.hosts, wrong.port, bytes(32), wrong.secret, wrong.expires)
        misled = await group.join(eve, str(impostor), state=tmp_path / "misled")
        await misled.printed("is not the machine that was expected")
        assert wrong.secret not in group.network.seen

        assert "anna" in await group.said(host, "members", "--remove", "anna")
        assert await first.wait() == 1
        assert "removed this machine" in first.output
        await serve.printed("route 1 ended")
        assert second.process.returncode is None

        assert b"Upgrade" not in group.network.seen
        await group.python(eve, STRANGER, host.address)
        assert b"Upgrade" in group.network.seen, "the tap hears what is not encrypted"


async def test_a_friend_without_an_invite_finds_the_cluster_and_is_let_in_by_a_code(
    model: Path, tmp_path: Path
) -> None:
    async with friends(2, tmp_path) as group:
        host, anna = group.network.hosts
        serve = await group.serve(model)
        await serve.printed("announced on the local network")
        node = await group.start(anna, "node", "--find", "--node-id", "anna", "--threads", "1")
        code = (await node.printed(r"tell the host this code: (\d{6})"))[1]
        await serve.printed(f"anna at {anna.address} asks to join: if it shows {code} too")
        assert code in await group.said(host, "members")
        assert "anna" in await group.said(host, "members", "--approve", code)
        await serve.printed("route 1 is ready")
        assert code.encode() not in group.network.seen


async def test_a_friend_comes_back_by_itself(model: Path, tmp_path: Path) -> None:
    """After its cable was pulled, after the coordinator was started anew, and after it was started anew itself."""
    async with friends(2, tmp_path) as group:
        _, anna = group.network.hosts
        serve = await group.serve(model)
        node = await group.join(anna, await group.invite("anna"))
        await serve.printed("route 1 is ready")
        await group.network.cut(anna)
        await serve.printed("node anna-.* left")
        await group.network.mend(anna)
        await serve.printed("route 2 is ready")
        serve.process.kill()
        await serve.process.wait()
        serve = await group.serve(model)
        await serve.printed("route 1 is ready")
        node.process.kill()
        await node.process.wait()
        await group.start(anna, "node", "--threads", "1")
        await serve.printed("route 2 is ready")


async def test_an_answer_outlives_a_cable(model: Path, tmp_path: Path) -> None:
    async with friends(4, tmp_path) as group:
        others = group.network.hosts[1:]
        names = [f"friend{number}" for number, _ in enumerate(others)]
        serve = await group.serve(model, "--min-nodes", "2", "--max-nodes", "2", "--no-prefix-cache")
        for friend, name in zip(others, names, strict=True):
            await group.join(friend, await group.invite(name))
            await serve.printed(f"node {name}-.* joined")
        await serve.printed("route 1 is ready")
        whole = await answered(await group.stream(LONG))
        running = await group.stream(LONG)
        await running.printed('(".*"\n){20}')
        hit = (await serve.printed(r"plan for route 1: (friend\d)"))[1]
        await group.network.cut(others[names.index(hit)])
        assert running.process.returncode is None
        assert await answered(running) == whole
        await serve.printed(f"route 1 ended: node '{hit}-.*' was lost")
        await serve.printed("route 2 is ready")


async def answered(stream: Program) -> str:
    assert await stream.wait() == 0, str(stream)
    text = "".join(map(json.loads, stream.output.splitlines()))
    assert text
    return text
