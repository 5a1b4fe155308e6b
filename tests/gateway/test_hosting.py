"""What is the host's: who may join, and what other machines would bring."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from core.gateway.settings import ApiSettings

HOSTS_OWN = [
    ("GET", "/v1/cluster/members", None),
    ("POST", "/v1/cluster/invites", {"seconds": 3600, "name": "anna"}),
    ("POST", "/v1/cluster/invites/revoke", {"id": "a1b2c3"}),
    ("POST", "/v1/cluster/members/decide", {"code": "123456", "decision": "approve"}),
    ("POST", "/v1/cluster/members/remove", {"name": "desk-abcdefgh"}),
    ("POST", "/v1/cluster/what-if", {"without": ["n1"]}),
]


async def test_members_askers_and_invites_are_listed(client: httpx.AsyncClient) -> None:
    told = (await client.get("/v1/cluster/members")).json()
    assert told["members"][0]["tokens"] == 321
    assert told["asking"][0]["code"] == "123456"
    assert told["invites"][0]["state"] == "open"


async def test_an_invite_comes_as_a_link_and_as_a_qr_code(client: httpx.AsyncClient, engine: Any) -> None:
    made = (await client.post("/v1/cluster/invites", json={"seconds": 3600, "name": "anna"})).json()
    assert made["link"] == "core://join/abc"
    size = len(made["qr"])
    assert size >= 21
    assert {len(row) for row in made["qr"]} == {size}
    assert made["qr"][0].startswith("11111110")
    assert engine.membership.asked == [("invite", "3600", "anna")]


@pytest.mark.parametrize("seconds", [0, 59, 400 * 86_400, "long"])
async def test_an_invite_can_not_last_too_long(client: httpx.AsyncClient, engine: Any, seconds: Any) -> None:
    assert (await client.post("/v1/cluster/invites", json={"seconds": seconds})).status_code == 400
    assert engine.membership.asked == []


async def test_what_is_decided_is_done(client: httpx.AsyncClient, engine: Any) -> None:
    said = [
        (await client.request(method, path, json=body)).json().get("message", "")
        for method, path, body in HOSTS_OWN[2:5]
    ]
    assert said == [
        "invite a1b2c3 is revoked",
        "laptop-abcdefgh is a member now",
        "desk-abcdefgh is no member any more",
    ]
    denied = await client.post("/v1/cluster/members/decide", json={"code": "1", "decision": "deny"})
    assert denied.json() == {"message": "laptop is not let in"}
    assert [what for what, *_ in engine.membership.asked] == ["revoke", "approve", "remove", "deny"]


async def test_a_code_that_nobody_shows_is_refused_in_words(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/cluster/members/decide", json={"code": "9", "decision": "approve"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_possible")
    assert "no machine asks" in answer.json()["error"]["message"]


async def test_other_machines_are_planned_with(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/cluster/what-if", json={"without": ["n1"], "memory_of_others": [5, 6]})
    assert answer.json()["message"] == "without 1, with 11 bytes"
    assert answer.json()["stages"] == [{"node_id": "n1", "start": 0, "end": 4, "nbytes": 9}]
    assert (await client.post("/v1/cluster/what-if", json={"without": ["nobody"]})).status_code == 400


class TestWhereEverybodyIsLetIn:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(allow_anonymous=True)

    @pytest.mark.parametrize(("method", "path", "body"), HOSTS_OWN)
    async def test_nobody_is_the_host(
        self, client: httpx.AsyncClient, engine: Any, method: str, path: str, body: Any
    ) -> None:
        answer = await client.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_only")
        assert engine.membership.asked == []

    async def test_the_page_is_told_so(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/me")).json()["host"] is False


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"first"}))

    @pytest.mark.parametrize(("method", "path", "body"), HOSTS_OWN)
    async def test_who_has_one_is(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
        assert (await client.request(method, path, json=body)).status_code == 401
        key = {"authorization": "Bearer first"}
        assert (await client.request(method, path, json=body, headers=key)).status_code == 200

    @pytest.mark.parametrize(("method", "path", "body"), HOSTS_OWN[1:])
    async def test_no_other_site_acts_with_a_login(
        self, client: httpx.AsyncClient, engine: Any, method: str, path: str, body: Any
    ) -> None:
        await client.post("/v1/login", json={"key": "first"})
        evil = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        assert (await client.request(method, path, json=body, headers=evil)).status_code == 403
        assert engine.membership.asked == []
