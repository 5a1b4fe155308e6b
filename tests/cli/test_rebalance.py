"""`core rebalance` beside a server that answers as it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from core import cli


@dataclass
class Api:
    url: str = ""
    status: int = 200
    body: object = field(default_factory=lambda: {"message": "plan 2 is being loaded"})
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


@pytest.fixture
def api() -> Iterator[Api]:
    told = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.asked.append(("POST", self.path, self.headers["authorization"]))
            body = json.dumps(told.body).encode()
            self.send_response(told.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        told.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield told
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORE_API_KEY", raising=False)


def status_of(url: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["core", "rebalance", "--url", url])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_it_prints_what_becomes_of_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORE_API_KEY", "a-key another")
    assert status_of(f"{api.url}/", monkeypatch) in (0, None)
    assert capsys.readouterr().out == "plan 2 is being loaded\n"
    assert api.asked == [("POST", "/v1/cluster/rebalance", "Bearer a-key")]


@pytest.mark.parametrize(
    ("status", "body", "ends_with", "said"),
    [
        (503, {"error": {"message": "Model is not ready.", "code": "cluster_not_ready"}}, 1, "Model is not ready."),
        (500, {"error": {"message": "The server had an error.", "code": None}}, 1, "The server had an error."),
        (
            401,
            {"error": {"message": "no", "code": "invalid_api_key"}},
            2,
            "CORE_API_KEY to one that the host made with `core keys add NAME`",
        ),
        (404, {"error": {"message": "Not Found", "code": None}}, 1, "is no cluster"),
        (200, [], 1, "is no cluster"),
    ],
)
def test_what_fails_is_said(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    body: object,
    ends_with: int,
    said: str,
) -> None:
    api.status, api.body = status, body
    assert status_of(api.url, monkeypatch) == ends_with
    assert said in capsys.readouterr().err


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("http://127.0.0.1:1", monkeypatch) == 1
    assert "is `core serve` running there?" in capsys.readouterr().err
