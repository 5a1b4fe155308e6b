"""The page: what a browser is given, how it logs in, and what it may not be made to do."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.gateway.logins import LOGIN_SECONDS, MAX_LOGINS, Logins
from core.gateway.page import parts
from core.gateway.settings import ApiSettings

WEB = Path(__file__).resolve().parents[2] / "core/gateway/web"
VENDORED = json.loads((WEB / "vendor/vendored.json").read_text(encoding="utf-8"))
MAX_LINES = 400
OWN = sorted(path for path in WEB.rglob("*.js") if path.parent.name != "vendor")
KEY = {"key": "first"}


def directives(answer: httpx.Response) -> dict[str, str]:
    policy = answer.headers["content-security-policy"].split(";")
    return {name: " ".join(sources) for name, *sources in (each.split() for each in policy)}


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/shared.css", "/page/icon.svg", "/page/vendor/preact.js"])
async def test_its_parts_come_with_a_policy_that_lets_nothing_else_in(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200
    policy = directives(answer)
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("frame-ancestors") == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


async def test_what_has_not_changed_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/app.js")
    again = await client.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "vendor/vendored.json", "../app.py", "%2e%2e/app.py", "vendor/"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404


def test_the_document_has_no_code_of_its_own_and_names_parts_that_there_are() -> None:
    document = (WEB / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\son\w+=|<script(?![^>]*\ssrc=)|style=", document)
    named = re.findall(r'(?:href|src)="page/([^"]+)"', document)
    assert len(named) > 4
    assert set(named) <= parts().keys()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(WEB).as_posix())
def test_a_module_is_short_and_imports_from_here_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    for name in re.findall(r'(?:from|import)\s*\(?\s*"([^"]+)"', source):
        assert name.startswith("."), name
        assert (path.parent / name).is_file(), name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)
    assert not re.search(r"""["'`]https?://""", source)


def test_every_vendored_library_is_the_one_that_is_listed() -> None:
    listed = {each["file"] for each in VENDORED}
    assert listed == {path.name for path in (WEB / "vendor").glob("*.js")}
    for each in VENDORED:
        data = (WEB / "vendor" / each["file"]).read_bytes()
        assert sha256(data).hexdigest() == each["sha256"], each["file"]
        for before, after in each.get("changed", ()):
            data = data.replace(after.encode(), before.encode())
        assert sha256(data).hexdigest() == each.get("original_sha256", each["sha256"]), each["file"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", each["version"])
        assert any(licence in each["licence"] for licence in ("MIT", "BSD-3-Clause", "Apache-2.0"))
        name = each["package"].split("/")[0].lstrip("@")
        assert (WEB / "vendor" / f"LICENSE.{name}").stat().st_size > 500


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"first"}))

    async def test_a_login_is_a_cookie_that_no_script_and_no_other_site_has(
        self, client: httpx.AsyncClient, engine: Any
    ) -> None:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/me")).status_code == 401
        answer = await client.post("/v1/login", json=KEY)
        assert answer.json() == {"host": False, "logged_in": True}
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert "first" not in cookie
        assert (await client.get("/v1/me")).json() == {"host": False, "logged_in": True}
        body = {"model": "org/tiny", "prompt": "hi"}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json=body, headers={"authorization": "Bearer first"})
        by_cookie, by_key = (request.client for request in engine.requests)
        assert by_cookie == by_key

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    async def test_the_cookie_does_nothing_for_others_pages(self, client: httpx.AsyncClient, site: str) -> None:
        await client.post("/v1/login", json=KEY)
        assert (await client.get("/v1/models", headers={"sec-fetch-site": site})).status_code == 401
        foreign = {"origin": "http://localhost:3000", "sec-fetch-site": site}
        assert (await client.post("/v1/cluster/rebalance", headers=foreign)).status_code == 403

    async def test_a_logout_ends_it_on_the_server(self, client: httpx.AsyncClient) -> None:
        cookie = (await client.post("/v1/login", json=KEY)).headers["set-cookie"].partition(";")[0]
        assert (await client.post("/v1/logout")).json() == {"host": False, "logged_in": False}
        assert (await client.get("/v1/me", headers={"cookie": cookie})).status_code == 401

    @pytest.mark.parametrize("body", [{"key": "second"}, {"key": ""}])
    async def test_a_wrong_key_is_refused(self, client: httpx.AsyncClient, body: dict[str, str]) -> None:
        answer = await client.post("/v1/login", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "set-cookie" not in answer.headers
        said = answer.json()["error"]["message"]
        assert "core keys add NAME" in said
        assert "Bearer" not in said


async def test_on_this_machine_alone_whoever_asks_is_the_host(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/me")).json() == {"host": True, "logged_in": False}
    assert (await client.post("/v1/login", json=KEY)).status_code == 400
    assert (await client.get("/", headers={"host": "evil.example"})).status_code == 403


def test_logins_are_bounded_and_end_by_themselves() -> None:
    now = 0.0
    logins = Logins(lambda: now)

    def scope(cookie: Any) -> Any:
        header = f"{cookie.key}={cookie.value}".encode()
        return {"type": "http", "scheme": "http", "server": ("127.0.0.1", 8000), "headers": [(b"cookie", header)]}

    here: Any = {"type": "http", "scheme": "http", "server": ("127.0.0.1", 8000), "headers": []}
    first, *_, last = [logins.open(b"%d" % at, here) for at in range(MAX_LOGINS + 1)]
    assert (logins.key(scope(first)), logins.key(scope(last))) == (b"", b"%d" % MAX_LOGINS)
    now = LOGIN_SECONDS
    assert logins.key(scope(last)) == logins.key(here) == b""
