"""What is the host's: who may join, and what other machines would bring."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import httpx
import pytest

from core.gateway.settings import ApiSettings
from core.interfaces.api_keys import KeyHolder

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


class Keys:
    """Named keys: whether they are the host's, by the key."""

    def __init__(self, **host: bool) -> None:
        self.host = host
        self._had_any = bool(host)

    def had_any(self) -> bool:
        self._had_any = self._had_any or bool(self.host)
        return self._had_any

    def holder(self, digest: bytes) -> KeyHolder | None:
        found = [name for name in self.host if sha256(name.encode()).digest() == digest]
        return KeyHolder(found[0], self.host[found[0]]) if found else None


class TestWithKeys:
    @pytest.fixture
    def named(self) -> Keys:
        return Keys(mine=True, annas=False)

    @pytest.fixture
    def settings(self, named: Keys) -> ApiSettings:
        return ApiSettings(keys=frozenset({"plain"}), named_keys=named)

    @pytest.mark.parametrize(("method", "path", "body"), HOSTS_OWN)
    async def test_the_hosts_own_key_is_needed(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any
    ) -> None:
        statuses = {
            key: (await client.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("nobodys", "mine", "annas", "plain")
        }
        assert statuses == {"nobodys": 401, "mine": 200, "annas": 403, "plain": 403}

    @pytest.mark.parametrize(("method", "path", "body"), HOSTS_OWN[1:])
    async def test_no_other_site_acts_with_a_login(
        self, client: httpx.AsyncClient, engine: Any, method: str, path: str, body: Any
    ) -> None:
        assert (await client.post("/v1/login", json={"key": "mine"})).json() == {"host": True, "logged_in": True}
        evil = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        assert (await client.request(method, path, json=body, headers=evil)).status_code == 403
        assert engine.membership.asked == []

    async def test_a_revoked_key_and_its_logins_end_at_once(self, client: httpx.AsyncClient, named: Keys) -> None:
        await client.post("/v1/login", json={"key": "annas"})
        assert (await client.get("/v1/models")).status_code == 200
        del named.host["annas"]
        assert (await client.get("/v1/models")).status_code == 401
        bearer = {"authorization": "Bearer annas"}
        assert (await client.get("/v1/models", headers=bearer)).status_code == 401

    async def test_clients_are_told_apart_by_whose_key_it_is(self, client: httpx.AsyncClient, engine: Any) -> None:
        for key in ("mine", "annas"):
            bearer = {"authorization": f"Bearer {key}"}
            await client.post("/v1/completions", json={"model": "org/tiny", "prompt": "hi"}, headers=bearer)
        assert [request.client for request in engine.requests] == ["key of mine", "key of annas"]


class TestWithNamedKeysAlone:
    @pytest.fixture
    def named(self) -> Keys:
        return Keys(mine=True)

    @pytest.fixture
    def settings(self, named: Keys) -> ApiSettings:
        return ApiSettings(named_keys=named)

    async def test_that_the_last_one_is_revoked_opens_nothing(self, client: httpx.AsyncClient, named: Keys) -> None:
        named.host.clear()
        assert (await client.get("/v1/models")).status_code == 401


class TestWhereThereAreNoneYet:
    @pytest.fixture
    def named(self) -> Keys:
        return Keys()

    @pytest.fixture
    def settings(self, named: Keys) -> ApiSettings:
        return ApiSettings(named_keys=named)

    async def test_the_first_one_closes_it_while_it_runs(self, client: httpx.AsyncClient, named: Keys) -> None:
        assert (await client.get("/v1/models")).status_code == 200
        named.host["annas"] = False
        assert (await client.get("/v1/models")).status_code == 401
        named.host.clear()
        assert (await client.get("/v1/models")).status_code == 401, "it stays closed"
