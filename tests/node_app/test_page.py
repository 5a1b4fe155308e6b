"""The status page over real sockets: what it shows, and whom it shows it to."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from core.discovery.advert import Advert
from core.errors import ConfigError, NoMulticast
from node_app.http import MAX_BODY, REQUEST_SECONDS, Request, Response, serve
from node_app.joining import Offer
from node_app.machine import Machine
from node_app.page import TICKET_SECONDS, Page
from node_app.settings import Hours, Limits, Settings
from node_app.status import State, Status

SECONDS = 300
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
JSON = {"Content-Type": "application/json"}


class Remembered:
    """Commands that only remember what they were asked."""

    def __init__(self) -> None:
        self.status = Status(State.DOWNLOADING, "desk:7001", progress=(1, 4), reason="why")
        self.machine = Machine(16 * 10**9, 8, 0, (("auto", "the best one"), ("cpu", "processor")))
        self.free_memory = 5 * 10**9
        self.offer: Offer | None = None
        self.starts_at_login = False
        self.settings = Settings("me")
        self.notice = "a notice"
        self.resumable = False
        self.asked: list[Any] = []
        self.deaf = False

    def join(self, invite: str) -> None:
        if invite == "bad":
            raise ConfigError("that is no invite", "bad", "ask for another")
        self.asked.append(invite)

    async def look_around(self) -> list[Advert]:
        self.asked.append("find")
        if self.deaf:
            raise NoMulticast("no multicast here")
        return [Advert("tiny", ("192.168.1.5", "10.0.0.5"), 7001, bytes(32), 1)]

    def ask(self, key: str) -> None:
        self.asked.append(key)

    def follow(self, link: str) -> None:
        self.join(link)

    def dismiss_offer(self) -> None:
        self.asked.append("dismiss")

    def start_at_login(self, wanted: bool) -> None:
        self.asked.append(("login", wanted))

    def end(self) -> None:
        self.asked.append("quit")

    def leave_cluster(self) -> None:
        self.asked.append("leave")

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def change_limits(self, limits: Limits) -> None:
        self.asked.append(limits)

    def log_tail(self, size: int) -> str:
        return f"the last {size} bytes"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Page, Remembered, httpx.AsyncClient]]:
    commands = Remembered()
    page = Page(commands, "1.2.3")
    with trio.fail_after(SECONDS + TICKET_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(page.run)
            async with httpx.AsyncClient(base_url=page.url, timeout=300) as client:
                yield page, commands, client
            nursery.cancel_scope.cancel()


async def test_it_shows_status_limits_and_log() -> None:
    async with served() as (_, _, client):
        status = (await client.get("status")).json()
        assert (status["state"], status["fraction"], status["reason"]) == ("downloading", 0.25, "why")
        assert (status["headline"], status["notice"]) == ("Downloading 25%", "a notice")
        assert status["limits"]["cpu_percent"] == 75
        assert (status["memory"], status["cores"]) == ("5.0 GB of 16.0 GB are free now", 8)
        assert (status["devices"], status["starts_at_login"]) == (
            [["auto", "the best one"], ["cpu", "processor"]],
            False,
        )
        assert (status["code"], status["offer"]) == ("", None)
        assert "bytes" in (await client.get("log")).text


@pytest.mark.parametrize(
    ("part", "kind"),
    [("", "text/html"), ("shared.css", "text/css"), ("page.css", "text/css"), ("page.js", "text/javascript")],
)
async def test_its_parts_are_there_and_allow_nothing_from_elsewhere(part: str, kind: str) -> None:
    async with served() as (_, _, client):
        answer = await client.get(part)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "http" not in answer.text.replace("https://", "http://").replace("http://www.w3.org", "")


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here")
async def test_a_browser_shows_it(tmp_path: Path) -> None:
    """What its script makes of the page; a ticket leads there."""
    async with served() as (page, commands, _):
        commands.status = replace(commands.status, state=State.CONNECTING, code="8D3K-22QX")
        commands.offer = Offer("core://join/x", "10.0.0.1:7001", "aaaaaaaa")
        looking = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        looking += ["--virtual-time-budget=5000", "--dump-dom", page.ticket()]
        shown = await trio.run_process(looking, capture_stdout=True, capture_stderr=True)
    text = shown.stdout.decode()
    for id, words in (
        ("headline", "Waiting for the host's answer"),
        ("code", "8D3K-22QX"),
        ("offer-host", "10.0.0.1:7001"),
        ("offer-key", "aaaaaaaa"),
        ("offer-leaves", "This machine then leaves desk:7001."),
        ("memory", "5.0 GB of 16.0 GB are free now"),
        ("reason", "why"),
        ("notice", "a notice"),
        ("announcement", "connecting: why"),
        ("cluster", "desk:7001"),
        ("duty", "Pause"),
        ("join-title", "Join another cluster"),
        ("version", "1.2.3"),
    ):
        assert re.search(rf'id="{id}"[^>]*>{re.escape(words)}<', text), id


async def test_what_is_asked_is_done() -> None:
    async with served() as (_, commands, client):
        for what, value in (
            ("join", "core://x"),
            ("link", "core://y"),
            ("pause", None),
            ("resume", None),
            ("leave", None),
            ("dismiss", None),
            ("login", True),
            ("quit", None),
        ):
            answer = await client.post(what, content=json.dumps(value), headers=JSON)
            assert answer.status_code == 200, answer.text
        limits = {"memory_gb": 4, "hours": {"start": "22:00", "end": "08:00"}, "cpu_percent": None}
        assert (await client.post("limits", json=limits)).status_code == 200
        assert commands.asked == [
            *("core://x", "core://y", "pause", "resume", "leave", "dismiss", ("login", True), "quit"),
            Limits(memory_gb=4, hours=Hours("22:00", "08:00"), cpu_percent=None),
        ]


async def test_a_cluster_is_looked_for_and_asked() -> None:
    async with served() as (_, commands, client):
        found = await client.post("find", content="null", headers=JSON)
        assert found.json() == [{"name": "tiny", "key": "aaaaaaaa", "host": "192.168.1.5"}]
        assert (await client.post("ask", content='"aaaaaaaa"', headers=JSON)).status_code == 200
        commands.deaf = True
        nothing = await client.post("find", content="null", headers=JSON)
        assert (nothing.status_code, nothing.text) == (400, "no multicast here")
        assert commands.asked == ["find", "aaaaaaaa", "find"]


@pytest.mark.parametrize(
    ("what", "body", "said"),
    [
        ("join", b'"bad"', "ask for another"),
        ("join", b"{}", "an invite or a key is text"),
        ("limits", b'{"cpu_percent": 0}', "a whole number from 1 to 100"),
        ("limits", b"", "these limits can't be taken"),
        ("login", b'"yes"', "true or false"),
    ],
)
async def test_what_can_not_be_is_refused_in_words(what: str, body: bytes, said: str) -> None:
    async with served() as (_, commands, client):
        answer = await client.post(what, content=body, headers=JSON)
        assert answer.status_code == 400
        assert said in answer.text
        assert commands.asked == []


async def test_without_the_token_there_is_nothing() -> None:
    async with served() as (page, commands, client):
        for path in ("/", "/status", "/x/status", f"/{page.token[:-1]}/status", f"/{page.token}", "/é/status"):
            assert (await client.get(f"http://127.0.0.1:{page.port}{path}")).status_code == 404, path
        assert (await client.post(f"http://127.0.0.1:{page.port}/x/pause", json=None)).status_code == 404
        assert commands.asked == []


async def test_another_hosts_name_is_refused_whoever_has_the_token() -> None:
    async with served() as (page, _, client):
        for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", ""):
            assert (await client.get("status", headers={"Host": host})).status_code in (400, 403), host
        assert (await client.get("status", headers={"Host": f"localhost:{page.port}"})).status_code == 200


async def test_another_sites_form_or_script_is_refused_whoever_has_the_token() -> None:
    async with served() as (page, commands, client):
        other = {**JSON, "Origin": "http://evil.example"}
        assert (await client.post("pause", content=b"null", headers=other)).status_code == 403
        form = await client.post("pause", data={"x": "y"})
        assert form.status_code == 415
        assert (await client.get("pause")).status_code == 404
        assert (await client.put("pause", json=None)).status_code == 405
        assert commands.asked == []
        own = {**JSON, "Origin": f"http://127.0.0.1:{page.port}"}
        assert (await client.post("pause", content=b"null", headers=own)).status_code == 200


async def test_a_ticket_is_good_once() -> None:
    async with served() as (page, _, client):
        ticket = (await client.post("ticket", content=b"null", headers=JSON)).text
        assert page.token not in ticket
        answer = await client.get(ticket)
        assert (answer.status_code, answer.headers["location"]) == (303, page.url)
        assert (await client.get(ticket)).status_code == 410


async def test_a_ticket_does_not_last(clock: MockClock) -> None:
    async with served() as (page, _, _):
        ticket = page.ticket()
        clock.jump(TICKET_SECONDS + 1)
        async with httpx.AsyncClient() as fresh:
            assert (await fresh.get(ticket)).status_code == 410
        assert len([page.ticket() for _ in range(40)]) == 40
        assert len(page._tickets) <= 16


@pytest.fixture
def clock() -> MockClock:
    return MockClock(rate=1.0)


@asynccontextmanager
async def raw(handler: Any) -> AsyncIterator[tuple[int, trio.SocketStream]]:
    with trio.fail_after(SECONDS + REQUEST_SECONDS):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve, handler)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                yield port, stream
            nursery.cancel_scope.cancel()


async def greet(request: Request) -> Response:
    return Response(json.dumps([request.method, request.path, len(request.body)]).encode())


async def all_of(stream: trio.SocketStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"b" * 100_000, b"413"),
    ],
)
async def test_what_is_no_request_gets_a_status(sent: bytes, status: bytes) -> None:
    async with raw(greet) as (_, stream), trio.open_nursery() as nursery:
        nursery.start_soon(_send, stream, sent)
        assert (await all_of(stream)).split(b" ")[1] == status


async def _send(stream: trio.SocketStream, data: bytes) -> None:
    try:
        await stream.send_all(data)
    except trio.BrokenResourceError:
        return


async def test_a_body_may_come_in_pieces() -> None:
    async with raw(greet) as (_, stream):
        await stream.send_all(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        await stream.send_all(b"cd")
        assert (await all_of(stream)).endswith(b'["POST", "/x", 4]')


async def test_a_client_that_says_nothing_is_let_go_and_keeps_nobody_waiting(clock: MockClock) -> None:
    async with raw(greet) as (port, silent):
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/x")).json() == ["GET", "/x", 0]
        clock.jump(REQUEST_SECONDS)
        assert await all_of(silent) == b""


async def test_a_handler_that_fails_costs_its_request_alone() -> None:
    async def fail(request: Request) -> Response:
        if request.path == "/fail":
            raise KeyError("x")
        return await greet(request)

    async with raw(fail) as (port, _), httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/fail")).status_code == 500
        assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 200
        assert (await client.post(f"http://127.0.0.1:{port}/", content=b"x" * MAX_BODY)).status_code == 200
