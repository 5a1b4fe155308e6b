"""From the start of `core serve` with two local nodes to the first token, against one process that loads the weights.

The other process imports torch and loads embedding, head and all layers with the same code: nobody who computes the
model's tokens can do with less. Caches are warm: each side runs once beforehand.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import httpx
import trio
from _measure import MODEL, QUESTION, machine, spread, verdict

from core.cli.demo_model import demo_model

GOAL_SECONDS = 3.0
PATIENCE_SECONDS = 60
POLL_SECONDS = 0.01
LOAD = """
import sys
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
import torch

torch.set_num_threads(1)
plugins = PluginHost.installed()
precision = Precision(plugins.quantizers.get("fp16"), DType.FP16, DType.FP32)
with Model.open(Source(sys.argv[1]), plugins) as model:
    outer = model.load_embed_and_head(precision, torch.device("cpu"))
    stage, _ = model.load_stage(range(model.spec.layers), precision, torch.device("cpu"))
"""


def seconds_to_load() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", LOAD, str(demo_model())], check=True, timeout=PATIENCE_SECONDS)
    return time.perf_counter() - started


async def seconds_to_first_token() -> dict[str, float]:
    """When each thing happened that can be seen from outside, in seconds after the process was started."""
    port = free_port()
    options = ["--local-nodes", "2", "--max-nodes", "2", "--threads", "1", "--api-port", str(port), "--node-port", "0"]
    options += ["--quant", "fp16", "--dtype", "fp16"]
    command = ["-m", "core", "serve", "--model", str(demo_model()), "--served-model-name", MODEL, *options]
    started = time.perf_counter()
    process = await trio.lowlevel.open_process(
        [sys.executable, *command, "--log-level", "error"], stdout=subprocess.DEVNULL
    )
    try:
        with trio.fail_after(PATIENCE_SECONDS):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client:
                times = await watch(client, started)
                await first_text(client)
                times["first token"] = time.perf_counter() - started
                return times
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


async def watch(client: httpx.AsyncClient, started: float) -> dict[str, float]:
    times: dict[str, float] = {}
    while True:
        with suppress(httpx.TransportError):
            status = (await client.get("/v1/cluster")).json()
            for event in events(status):
                times.setdefault(event, time.perf_counter() - started)
            if status["state"] == "ready":
                return times
        await trio.sleep(POLL_SECONDS)


def events(status: dict[str, Any]) -> list[str]:
    """What a status shows to have happened, and the phase that the coordinator is in before it waits for nodes."""
    nodes, phase = status["nodes"], status["detail"]
    shown = {
        "the API answers": True,
        phase: status["state"] == "waiting" and "must join" not in phase,
        "a node has joined": len(nodes) > 0,
        "both have joined": len(nodes) > 1,
        "layers are assigned": any(node["layers"] for node in nodes),
        "a node has loaded": any(node["weight_bytes"] for node in nodes),
        "both have loaded": sum(node["weight_bytes"] > 0 for node in nodes) > 1,
        "ready": status["state"] == "ready",
    }
    return [event for event, happened in shown.items() if happened]


async def first_text(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return
    raise SystemExit("the answer had no text")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def main(rounds: int) -> None:
    print(machine())
    await seconds_to_first_token()
    seconds_to_load()
    loads, timelines = [], defaultdict(list)
    for _ in range(rounds):
        for event, seconds in (await seconds_to_first_token()).items():
            timelines[event].append(seconds)
        loads.append(seconds_to_load())
    differences = [ours - load for ours, load in zip(timelines["first token"], loads, strict=True)]
    print(f"\n{rounds} rounds; seconds after the start of `core serve`")
    for event, times in sorted(timelines.items(), key=lambda item: statistics.median(item[1])):
        print(f"{event:<36}{spread(times)}")
    print(f"{'one process imports and loads':<36}{spread(loads)}")
    print(f"{'difference':<36}{spread(differences)}")
    print(verdict(f"median difference <= {GOAL_SECONDS:g} s", statistics.median(differences) <= GOAL_SECONDS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    trio.run(main, parser.parse_args().rounds)
