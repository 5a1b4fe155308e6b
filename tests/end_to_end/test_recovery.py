"""Real machines that die in mid-answer: the same streams go on, with the texts that they would have had."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from core.testing.cluster import Cluster, open_cluster

SECONDS = 900
TOKENS = 60
PROMPTS = ("ade", "Hello", "The layers of one model lie on several machines.", "machine machine")
Streaming = Callable[..., Any]


class Text:
    """What one stream tells; `reached` is set at so many events, and `error` is what it ended with."""

    def __init__(self, at: int) -> None:
        self.text = self.error = ""
        self.usage: dict[str, int] = {}
        self.reached = trio.Event()
        self._at = at

    async def read(self, streaming: Streaming, cluster: Cluster, prompt: str) -> None:
        options = {"max_tokens": TOKENS, "stream_options": {"include_usage": True}, "ignore_eos": True}
        seen = 0
        async with streaming(cluster, prompt, **options) as events:
            async for event in events:
                self.error = event.get("error", {}).get("message", "")
                self.usage = event.get("usage") or self.usage
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                seen += 1
                if seen == self._at:
                    self.reached.set()
        self.reached.set()


async def holders(cluster: Cluster) -> list[str]:
    """The nodes that serve, in the order of their layers."""
    nodes = [node for node in (await cluster.status())["nodes"] if node["layers"]]
    return [str(node["node_id"]) for node in sorted(nodes, key=lambda node: node["layers"])]


HARMS = (("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 1), ("SIGTERM", 0))
"""What befalls the node at which place in the route, one after another."""


@pytest.mark.unix
async def test_streams_outlive_machines_that_are_killed_or_stopped_or_asked_to_leave(
    model: Path, streaming: Streaming
) -> None:
    options = ("--dtype", "fp32", "--min-nodes", "2", "--max-nodes", "2", "--no-prefix-cache")
    with trio.fail_after(SECONDS):
        async with open_cluster(model, *options) as cluster:
            for name in ("a", "b"):
                await cluster.start_node(name)
            await cluster.wait_ready()
            expected = [await whole(cluster, prompt) for prompt in PROMPTS]
            for number, (harm, place) in enumerate(HARMS):
                await cluster.start_node(f"spare {number}")
                await cluster.wait_until(lambda status: status["state"] == "ready" and len(status["nodes"]) == 3)
                await check_they_go_on(cluster, streaming, expected, harm, place)
            await cluster.wait_until(lambda status: all(node["kv_tokens"] == 0 for node in status["nodes"]))


async def check_they_go_on(cluster: Cluster, streaming: Streaming, expected: list[str], harm: str, place: int) -> None:
    texts = [Text(at=3 + 4 * index) for index in range(len(PROMPTS))]
    async with trio.open_nursery() as nursery:
        for text, prompt in zip(texts, PROMPTS, strict=True):
            nursery.start_soon(text.read, streaming, cluster, prompt)
        await texts[-1].reached.wait()
        hit = (await holders(cluster))[place]
        await cluster.send_signal(hit, signal.Signals[harm])
    assert [text.error for text in texts] == [""] * len(PROMPTS)
    assert [text.text for text in texts] == expected
    assert [text.usage["completion_tokens"] for text in texts] == [TOKENS] * len(PROMPTS)
    await cluster.wait_until(lambda status: hit not in {node["node_id"] for node in status["nodes"]})
    if harm == "SIGSTOP":
        await cluster.kill(hit)


async def whole(cluster: Cluster, prompt: str) -> str:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with cluster.client() as client:
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return str(answer["choices"][0]["text"])
