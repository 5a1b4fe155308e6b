"""Metrics and events, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from core.gateway.pulse import Pulse
from core.interfaces.engine import ClusterStatus


async def test_metrics_are_read_by_prometheus_own_parser(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["core_tokens_total", ()] == 7
    assert found["core_by_node", (("node", 'a"b'),)] == 1.5
    assert found["core_ttft_seconds_bucket", (("le", "0.1"),)] == 1
    assert (found["core_ttft_seconds_count", ()], found["core_ttft_seconds_sum", ()]) == (3, 2.5)


async def test_events_tell_phases_recoveries_failures_and_machines_that_slow_down(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/v1/cluster/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    *told, pace = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert pace == {"node_id": "n2", "pace": "slower", "token_seconds": 0.084, "planned_seconds": 0.06}
    assert [(each["phase"], each["prefilled"], each["detail"], each["recoveries"]) for each in told] == [
        ("prefill", 60, "", 0),
        ("suspended", 60, "node 'n2' was lost", 1),
        ("failed", 100, "node 'n1' was lost", 1),
    ]


async def test_the_document_describes_recoveries_and_pace(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    assert "#/components/schemas/PaceStatus" in json.dumps(described["paths"]["/v1/cluster/events"])
    status = described["components"]["schemas"]["SessionStatus"]
    assert "suspended" in status["properties"]["phase"]["enum"]
    assert "recoveries" in status["properties"]
    assert "recoveries" in status["description"]


async def test_before_the_model_is_open_there_are_no_events(client: httpx.AsyncClient, engine: Any) -> None:
    engine.state = "loading"
    answer = await client.get("/v1/cluster/events")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "cluster_not_ready"


async def statuses(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("GET", "/v1/cluster/events?of=cluster") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_the_cluster_is_told_at_once_and_as_it_changes(client: httpx.AsyncClient, engine: Any) -> None:
    engine.state = "loading"
    async with aclosing(statuses(client)) as told:
        assert (await anext(told))["state"] == "loading"
        engine.state = "ready"
        assert (await anext(told))["state"] == "ready"


async def test_however_many_watch_the_status_is_worked_out_once_a_second(
    autojump_clock: MockClock, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    status = engine.status

    def counted() -> ClusterStatus:
        nonlocal asked
        asked += 1
        return replace(status(), route_epoch=asked)

    monkeypatch.setattr(engine, "status", counted)
    pulse = Pulse(engine)
    told: list[int] = []

    async def watch() -> None:
        async with pulse.watch() as statuses:
            async for each in statuses:
                told.append(json.loads(each)["route_epoch"])

    with trio.move_on_after(9.5):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(watch)
    assert asked == 10
    assert sorted(told) == sorted([*range(1, 11)] * 20)


async def test_what_does_not_change_is_told_once(autojump_clock: MockClock, engine: Any) -> None:
    told = []
    with trio.move_on_after(60):
        async with Pulse(engine).watch() as statuses:
            async for each in statuses:
                told.append(each)
    assert len(told) == 1


async def test_there_are_no_other_events(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/cluster/events?of=everything")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "of")


async def test_an_hour_is_told(client: httpx.AsyncClient) -> None:
    told = (await client.get("/v1/cluster/history")).json()
    assert told == {"seconds": 10, "points": [{"at": 1_700_000_000, "tokens": 42, "sessions": 2}]}
