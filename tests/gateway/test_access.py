"""Who is let in: API keys, and pages of other origins."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from core.errors import ConfigError
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings, parse_keys

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
ORIGIN = "https://chat.example"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"first", "second"}), cors_origins=(ORIGIN,))

    @pytest.mark.parametrize("key", ["first", "second"])
    async def test_each_key_opens(self, client: httpx.AsyncClient, key: str) -> None:
        response = await client.post("/v1/completions", json=COMPLETION, headers=bearer(key))
        assert response.status_code == 200

    @pytest.mark.parametrize(
        "headers", [{}, bearer("third"), {"authorization": "Bearer"}, {"authorization": "Basic first"}]
    )
    @pytest.mark.parametrize(
        ("method", "path"),
        [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/cluster"), ("POST", "/tokenize")],
    )
    async def test_without_a_key_nothing_does(
        self, client: httpx.AsyncClient, engine: Any, headers: dict[str, str], method: str, path: str
    ) -> None:
        response = await client.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "`core keys add NAME`, as 'Authorization: Bearer KEY'" in error["message"]
        assert "third" not in response.text
        assert engine.requests == []

    async def test_health_stays_open(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200

    async def test_clients_are_told_apart_by_their_keys_which_stay_secret(
        self, client: httpx.AsyncClient, engine: Any
    ) -> None:
        for key in ("first", "second", "first"):
            await client.post("/v1/completions", json=COMPLETION, headers=bearer(key))
        first, second, again = (request.client for request in engine.requests)
        assert first == again != second
        assert "first" not in first

    async def test_a_page_of_an_allowed_origin_may_ask(self, client: httpx.AsyncClient) -> None:
        asking = {"origin": ORIGIN, "access-control-request-method": "POST"}
        asking["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
        allowed = await client.options("/v1/completions", headers=asking)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        told = await client.post("/v1/completions", json=COMPLETION, headers={"origin": ORIGIN})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (401, ORIGIN)
        body = {**COMPLETION, "stream": True}
        streamed = await client.post("/v1/completions", json=body, headers={"origin": ORIGIN, **bearer("first")})
        assert streamed.headers["access-control-allow-origin"] == ORIGIN

    async def test_a_page_of_another_origin_may_not(self, client: httpx.AsyncClient) -> None:
        response = await client.post(
            "/v1/completions", json=COMPLETION, headers={"origin": "https://evil.example", **bearer("first")}
        )
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers

    async def test_a_server_with_keys_is_called_by_any_name(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health", headers={"host": "core.example"})).status_code == 200


async def test_without_keys_clients_are_told_apart_by_address(client: httpx.AsyncClient, engine: Any) -> None:
    await client.post("/v1/completions", json=COMPLETION, headers=bearer("whatever"))
    assert [request.client for request in engine.requests] == ["address 127.0.0.1"]


async def test_no_page_may_ask_unless_it_is_allowed(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"origin": ORIGIN})
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [ORIGIN, "null", "http://localhost:3000"])
async def test_a_page_cant_even_have_something_computed(client: httpx.AsyncClient, engine: Any, origin: str) -> None:
    simple = {"origin": origin, "content-type": "text/plain", "sec-fetch-site": "cross-site"}
    response = await client.post("/v1/completions", json=COMPLETION, headers=simple)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_page")
    assert engine.requests == []


async def test_a_page_beside_the_api_behind_one_proxy_may_ask(client: httpx.AsyncClient) -> None:
    for headers in (
        {"origin": ORIGIN, "sec-fetch-site": "same-origin"},
        {"origin": "http://localhost", "host": "localhost"},
    ):
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("printer.internal:8000", 403),
        ("", 403),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.2", 200),
        ("host.docker.internal:8000", 200),
    ],
)
async def test_a_name_that_leads_here_by_a_trick_of_dns_is_refused(
    client: httpx.AsyncClient, host: str, status: int
) -> None:
    assert (await client.get("/v1/models", headers={"host": host})).status_code == status


async def test_a_server_that_others_reach_needs_a_key(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"everyone.*--api-key-file.*127\.0\.0\.1.*--allow-anonymous-api"):
        await serve_http(engine, "0.0.0.0", 0)


@pytest.mark.parametrize("settings", [ApiSettings(keys=frozenset({"x"})), ApiSettings(allow_anonymous=True)])
async def test_a_server_that_has_one_is_open_to_others(engine: Any, nursery: Any, settings: ApiSettings) -> None:
    assert (await nursery.start(serve_http, engine, "0.0.0.0", 0, settings))[1] > 0


def test_keys_stand_one_a_line() -> None:
    assert parse_keys("one\n\n two \r\n", "x") == {"one", "two"}
    assert "s3cret" not in repr(ApiSettings(keys=parse_keys("s3cret", "x")))


@pytest.mark.parametrize("text", ["", " \n", "a b", "schlüssel", "a\tb"])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="the file") as caught:
        parse_keys(text, "the file")
    assert not text.strip() or text.strip() not in str(caught.value)
