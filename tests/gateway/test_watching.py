"""Metrics and events, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


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
