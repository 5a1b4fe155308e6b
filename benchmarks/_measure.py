"""What the benchmarks share: the machine in one line, figures with their spread, a cluster of the demo's model."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trio

from core.cli.demo_model import demo_model
from core.cli.serve import Server, serving
from core.coordinator.settings import CoordinatorSettings
from core.errors import CoreError
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.runtime.bench import Round

MODEL = "smollm2-135m-instruct"
QUESTION = "Tell a long story about a lighthouse keeper and the sea."
READY_SECONDS = 120


def machine() -> str:
    """Processor, cores, versions, and how busy others keep the machine."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"machine     {_processor()}, {os.cpu_count()} cores{load}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """Median, extremes and, where there are enough values for it, the 95th percentile."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    if len(values) >= 20:
        figures["p95"] = statistics.quantiles(values, n=20)[-1]
    shown = ", ".join(f"{name} {value:.{digits}f}" for name, value in figures.items())
    return f"{shown} {unit}".rstrip()


class _Stamps:
    """A streamer for `generate`: when each token came by `clock`, the prompt first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._clock = clock

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self._clock())

    def end(self) -> None: ...


def generated(oracle: Any, prompt: Sequence[int], tokens: int, clock: Callable[[], float] = time.perf_counter) -> Round:
    """What transformers' greedy `generate` takes for the prompt and `tokens` tokens after the first."""
    ids, stamps, length = torch.tensor([prompt], device=oracle.device), _Stamps(clock), tokens + 1
    oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        streamer=stamps,
        min_new_tokens=length,
        max_new_tokens=length,
    )
    prompted, first, *_, last = stamps.times
    return Round(first - prompted, last - first)


def verdict(goal: str, reached: bool) -> str:
    return f"goal        {goal}: {'reached' if reached else 'MISSED'}"


@asynccontextmanager
async def local_cluster(
    dtype: DType = DType.FP16, wire_dtype: str = "auto", nodes: int = 2, threads: int = 1, **more: Any
) -> AsyncIterator[Server]:
    """The demo's model, served by this process and `nodes` others, once a token has passed through all of them.

    `more` of CoordinatorSettings.
    """
    settings = CoordinatorSettings(
        source=Source(str(demo_model())),
        served_model_name=MODEL,
        node_port=0,
        min_nodes=nodes,
        max_nodes=nodes,
        local_nodes=nodes,
        dtype=dtype,
        wire_dtype=wire_dtype,
        threads=threads,
        **{"quant": "fp16", **more},
    )
    async with serving(settings, "127.0.0.1", 0, ApiSettings(), lambda line: None) as server:
        await until_ready(server)
        yield server


async def until_ready(server: Server, seconds: int = READY_SECONDS) -> None:
    for _ in range(20 * seconds):
        if server.coordinator.status().state == "ready":
            return
        await trio.sleep(0.05)
    raise CoreError("the cluster did not get ready", server.coordinator.status().detail)


class Worker:
    """Another process that answers each line with a line of JSON, and does nothing meanwhile."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = b""

    async def ask(self, question: str = "") -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        await self._process.stdin.send_all(question.encode() + b"\n")
        while b"\n" not in self._received:
            chunk = await self._process.stdout.receive_some()
            if not chunk:
                raise CoreError("a benchmark's worker process ended", "its error is above")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


@asynccontextmanager
async def open_worker(*arguments: str) -> AsyncIterator[Worker]:
    """`python arguments` for the length of the block."""
    command = [sys.executable, *arguments]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Worker(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def answer_lines(answer: Callable[[str], Any]) -> None:
    """The worker's side: `answer` gets each line."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)
