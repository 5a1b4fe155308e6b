"""SIGTERM and Ctrl-C end coordinator and nodes cleanly, also under an open stream."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from core.testing.cluster import COORDINATOR, open_cluster

SECONDS = 300
pytestmark = pytest.mark.unix
ENDLESS = "ade"
"""A prompt that the model comes to no end of."""
Streaming = Callable[..., Any]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_coordinator_and_nodes_while_a_stream_is_open(
    model: Path, streaming: Streaming, number: signal.Signals
) -> None:
    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--min-nodes", "2", local_nodes=1) as cluster:
            node = await cluster.start_node("mine")
            await cluster.wait_ready()
            local = cluster.processes()["local-1"]
            async with streaming(cluster, ENDLESS, max_tokens=4000) as events:
                await anext(events)
                await cluster.send_signal(COORDINATOR, number)
                signalled = time.monotonic()
                last = [event async for event in events][-1]
                status = await cluster.programs[0].wait(SECONDS)
                print(f"the coordinator ended with {status} after {time.monotonic() - signalled:.2f} s")
            assert last["error"]["code"] == "server_shutting_down"
            ended = 130 if number == signal.SIGINT else 0
            assert status == ended
            assert "stopping" in cluster.programs[0].output
            assert not local.is_running()
            await cluster.send_signal("mine", number)
            signalled = time.monotonic()
            assert await node.wait(SECONDS) == ended
            print(f"the node ended after {time.monotonic() - signalled:.2f} s")
    for program in cluster.programs:
        assert "Traceback" not in program.output, program


async def test_a_node_that_is_asked_to_end_finishes_the_answer_first_unless_it_is_asked_twice(
    model: Path, streaming: Streaming
) -> None:
    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--recovery-time", "0") as cluster:
            node = await cluster.start_node("mine")
            await cluster.wait_ready()
            async with streaming(cluster, ENDLESS, max_tokens=100) as events:
                await anext(events)
                await cluster.send_signal("mine", signal.SIGTERM)
                last = [event async for event in events][-1]
            assert last["choices"][0]["finish_reason"] == "length"
            assert await node.wait(SECONDS) == 0
            await cluster.wait_until(lambda status: not status["nodes"])
            assert "node mine left: its user ended it" in cluster.programs[0].output
            node = await cluster.start_node("hasty")
            await cluster.wait_ready()
            async with streaming(cluster, ENDLESS, max_tokens=4000) as events:
                await anext(events)
                await cluster.send_signal("hasty", signal.SIGTERM)
                await node.printed("once more ends it at once")
                await cluster.send_signal("hasty", signal.SIGTERM)
                last = [event async for event in events][-1]
            assert await node.wait(SECONDS) == 0
            assert "node 'hasty' was lost with layers [0, 6)" in last["error"]["message"]
            async with cluster.client() as client:
                assert (await client.get("/health")).status_code == 503
    for program in cluster.programs:
        assert "Traceback" not in program.output, program
