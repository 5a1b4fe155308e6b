"""`/v1/cluster/rebalance`: who may ask for another plan, and what is answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from core.gateway.settings import ApiSettings

PATH = "/v1/cluster/rebalance"


async def test_the_engines_sentence_is_the_answer(client: httpx.AsyncClient, engine: Any) -> None:
    response = await client.post(PATH)
    assert (response.status_code, response.json()) == (200, {"message": "plan 2 is being loaded"})
    assert engine.rebalanced == 1


async def test_before_the_model_is_open_there_is_nothing_to_plan(client: httpx.AsyncClient, engine: Any) -> None:
    engine.state = "loading"
    response = await client.post(PATH)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cluster_not_ready")


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}])
async def test_a_page_may_not(client: httpx.AsyncClient, engine: Any, headers: dict[str, str]) -> None:
    assert (await client.post(PATH, headers=headers)).status_code == 403
    assert engine.rebalanced == 0


async def test_looking_at_it_changes_nothing(client: httpx.AsyncClient, engine: Any) -> None:
    assert (await client.get(PATH)).status_code == 405
    assert engine.rebalanced == 0


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"a-key"}))

    async def test_a_key_is_needed(self, client: httpx.AsyncClient, engine: Any) -> None:
        assert (await client.post(PATH)).status_code == 401
        assert engine.rebalanced == 0
        assert (await client.post(PATH, headers={"authorization": "Bearer a-key"})).status_code == 200
