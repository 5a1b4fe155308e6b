"""Nodes come and go, coordinators too: what is said meanwhile, and that it serves again."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from core.testing.cluster import COORDINATOR, POLL_SECONDS, Cluster, open_cluster

SECONDS = 900
ENDLESS = "ade"
"""A prompt that the model comes to no end of."""
MANY = 400
"""Tokens of an answer that takes longer than it takes to find a process and kill it."""
CHAT = {"model": "tested", "messages": [{"role": "user", "content": "Hello"}]}
Streaming = Callable[..., Any]


async def check_serves(cluster: Cluster, oracle: Any) -> None:
    async with cluster.client() as client:
        body = {"model": cluster.model, "prompt": "Hello", "max_tokens": 24, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    oracle.check(answer["choices"][0]["text"], oracle.encode("Hello"), 24)


def check_not_ready(answer: httpx.Response, reason: str) -> None:
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["code"] == error["type"] == "cluster_not_ready"
    assert error["message"].startswith(f"Model is not ready. {reason}")


def holder(status: dict[str, Any], layer: int) -> dict[str, Any]:
    """The node that holds `layer`."""
    return next(node for node in status["nodes"] if node["layers"] and layer in range(*node["layers"]))


async def error_at_the_end(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    error: dict[str, Any] = [event async for event in events][-1]["error"]
    return error


async def test_it_says_what_is_missing_from_the_first_moment_until_it_serves(model: Path, oracle: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first: list[httpx.Response] = []

    async def ask_as_soon_as_it_listens() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
            while not first:
                try:
                    first.append(await client.get("/health"))
                    first.append(await client.post("/v1/chat/completions", json=CHAT))
                except httpx.ConnectError:
                    await trio.sleep(POLL_SECONDS)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_as_soon_as_it_listens)
            options = ("--dtype", "fp32", "--min-nodes", "2", "--api-port", str(port))
            async with open_cluster(model, *options) as cluster:
                check_not_ready(first[1], "Required nodes: 2, connected ready nodes: 0. starting")
                assert first[0].status_code == 503
                assert first[0].json()["status"] == "waiting"
                await cluster.start_node("one")
                await cluster.wait_until(lambda status: status["ready_nodes"] == 1)
                waiting = "Required nodes: 2, connected ready nodes: 1. 1 more node must join. Try again later."
                async with cluster.client() as client:
                    for stream in (False, True):
                        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
                        check_not_ready(answer, waiting)
                await cluster.start_node("two")
                await cluster.wait_ready()
                await check_serves(cluster, oracle)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_leaves_nothing_on_any_node(pair: Cluster, stream: bool) -> None:
    body = {"model": pair.model, "prompt": ENDLESS, "temperature": 0, "max_tokens": 4000, "stream": stream}

    async def ask(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await response.aread()
        raise AssertionError("it came to an end before its client went away")

    def running(status: dict[str, Any]) -> bool:
        return status["sessions"] == 1 and all(node["kv_tokens"] > 0 for node in status["nodes"])

    def free(status: dict[str, Any]) -> bool:
        return status["sessions"] == 0 and all(n["sessions"] == n["kv_tokens"] == 0 for n in status["nodes"])

    with trio.fail_after(SECONDS):
        async with pair.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(ask, client)
            await pair.wait_until(running)
            nursery.cancel_scope.cancel()
        gone = time.monotonic()
        await pair.wait_until(free)
        print(f"everything was freed {time.monotonic() - gone:.2f} s after the client had gone")


@pytest.mark.unix
async def test_a_node_that_is_killed_or_hangs_ends_the_answer_with_its_name_and_the_next_one_is_whole(
    model: Path, oracle: Any, streaming: Streaming
) -> None:
    """Another takes the place of one that was killed; one that hung is taken back when it goes on."""

    async def error_after(number: signal.Signals, victim: dict[str, Any]) -> dict[str, Any]:
        async with streaming(cluster, ENDLESS, max_tokens=4000) as events:
            await anext(events)
            await cluster.send_signal(victim["node_id"], number)
            hit = time.monotonic()
            error = await error_at_the_end(events)
            print(f"the stream ended {time.monotonic() - hit:.2f} s after {number.name}: {error['message']}")
        assert error["code"] == "route_lost"
        start, end = victim["layers"]
        assert f"node {victim['node_id']!r} was lost with layers [{start}, {end})" in error["message"]
        return error

    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--dtype", "fp32", "--min-nodes", "3", "--recovery-time", "0") as cluster:
            for name in ("a", "b", "c"):
                await cluster.start_node(name)
            await cluster.wait_ready()
            ranges = sorted(node["layers"] for node in (await cluster.status())["nodes"])
            assert [layer for start, end in ranges for layer in range(start, end)] == list(range(6))
            assert all(start < end for start, end in ranges)
            for layer in (0, 2, 5):
                victim = holder(await cluster.status(), layer)
                await error_after(signal.SIGKILL, victim)
                async with cluster.client() as client:
                    health = await client.get("/health")
                    assert health.status_code == 503
                    assert f"node {victim['node_id']!r} was lost" in health.json()["detail"]
                    check_not_ready(await client.post("/v1/chat/completions", json=CHAT), "Required nodes: 3, ")
                await cluster.start_node(f"in place of {victim['node_id']}")
                await cluster.wait_ready()
                await check_serves(cluster, oracle)
            victim = holder(await cluster.status(), 2)
            assert "silent" in (await error_after(signal.SIGSTOP, victim))["message"]
            await cluster.send_signal(victim["node_id"], signal.SIGCONT)
            await cluster.wait_ready()
            await check_serves(cluster, oracle)


async def test_a_local_node_that_is_killed_is_started_again_and_every_answer_goes_on(model: Path, oracle: Any) -> None:
    texts: list[str] = []
    fields: Any = {"prompt": ENDLESS, "temperature": 0, "max_tokens": MANY}

    async def ask(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="tested", **fields)
        texts.append(answer.choices[0].text)

    async def ask_for_a_stream(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model="tested", stream=True, **fields)
        texts.append("".join([event.choices[0].text async for event in stream]))

    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--dtype", "fp32", local_nodes=2) as cluster:
            await cluster.wait_ready()
            client = openai.AsyncOpenAI(base_url=cluster.api, api_key="none", max_retries=0)
            async with client, trio.open_nursery() as nursery:
                for way in (ask, ask_for_a_stream):
                    nursery.start_soon(way, client)
                await cluster.wait_until(lambda status: all(node["sessions"] == 2 for node in status["nodes"]))
                await cluster.kill("local-1")
            assert cluster.processes().keys() == {COORDINATOR, "local-1", "local-2"}
            async with cluster.client() as plain:
                assert "core_recoveries_total 2" in (await plain.get("/metrics")).text
    for text in texts:
        oracle.check(text, oracle.encode(ENDLESS), MANY)


async def test_local_nodes_end_with_a_killed_coordinator_and_others_keep_their_layers_for_the_next_one(
    model: Path, oracle: Any
) -> None:
    def layers(status: dict[str, Any]) -> dict[str, list[int]]:
        return {node["node_id"]: node["layers"] for node in status["nodes"]}

    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--dtype", "fp32", "--min-nodes", "3", local_nodes=1) as cluster:
            nodes = [await cluster.start_node(name) for name in ("a", "b")]
            await cluster.wait_ready()
            before = layers(await cluster.status())
            local = cluster.processes()["local-1"]
            await cluster.kill(COORDINATOR)
            killed = time.monotonic()
            await trio.to_thread.run_sync(local.wait, SECONDS)
            print(f"the local node had ended {time.monotonic() - killed:.2f} s after its coordinator's death")
            await cluster.start_coordinator()
            await cluster.wait_ready()
            assert layers(await cluster.status()) == before
            await check_serves(cluster, oracle)
            assert all(node.process.returncode is None for node in nodes)
