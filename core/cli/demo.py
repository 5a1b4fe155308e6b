"""`core demo`: one coordinator, two node processes, a real model, one question."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import trio
import typer

from core.cli.console import counted, interruptible, run, set_up_logging
from core.cli.demo_model import demo_model, model_path
from core.cli.options import LogLevel
from core.cli.serve import Server, serving, show_progress
from core.coordinator.settings import CoordinatorSettings
from core.errors import CoreError
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source

QUESTION = "What is the capital of France, and what is it known for?"
READY_SECONDS = 180
ANSWER_SECONDS = 180


def demo(
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    nodes: Annotated[int, typer.Option(help="Node processes to start.", min=1, max=30)] = 2,
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
    api_port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 0,
    log_level: LogLevel = "warning",
) -> None:
    """Try it: a small model on this machine answers a question. It is real, and split over node processes."""
    set_up_logging(log_level)
    typer.echo("model       SmolLM2-135M-Instruct, 98 MB, downloaded the first time")
    typer.echo(f"            in {model_path()}")
    with interruptible():
        model = demo_model()
    settings = CoordinatorSettings(
        source=Source(str(model)),
        served_model_name="smollm2-135m-instruct",
        node_port=0,
        min_nodes=nodes,
        max_nodes=nodes,
        local_nodes=nodes,
    )

    async def main() -> None:
        async with serving(settings, "127.0.0.1", api_port, ApiSettings(), typer.echo) as server:
            await _wait_ready(server)
            await _ask(server, settings.served_model_name, question)
            if not once:
                typer.echo(_try_it(server, settings.served_model_name))
                await trio.sleep_forever()

    run(main)


async def _wait_ready(server: Server) -> None:
    typer.echo(f"waiting     until a token has passed through every layer (at most {READY_SECONDS} s)")
    with trio.move_on_after(READY_SECONDS):
        await show_progress(server.coordinator)
        return
    detail = server.coordinator.status().detail
    raise CoreError("the demo's cluster did not get ready", detail, "see what happens with --log-level info")


@dataclass(slots=True)
class _Timing:
    asked: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def describe(self) -> str:
        first = self.first if self.first is not None else self.last
        span = self.last - first
        speed = f", {(self.tokens - 1) / span:.1f} tokens/s" if self.tokens > 1 and span > 0 else ""
        return f"first token after {first - self.asked:.2f} s, {counted(self.tokens, 'token')}{speed}"


async def _ask(server: Server, model: str, question: str) -> None:
    typer.echo(f"\nquestion    {question}\nanswer      ", nl=False)
    timing = _Timing(asked=time.monotonic())
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 120,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async for event in _events(f"{server.url}/v1/chat/completions", body):
        timing.last = time.monotonic()
        if event.get("usage"):
            timing.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text and timing.first is None:
                timing.first = timing.last
            typer.echo(text, nl=False)
    typer.echo(f"\n\nmeasured    {timing.describe()}")


async def _events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises CoreError with the API's message where it is an error."""
    import httpx

    # The API is on this machine, whatever proxy the environment names.
    client = httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False)
    try:
        async with client, client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise CoreError("the demo's question was refused", (await response.aread()).decode())
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: ") and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise CoreError("the answer broke off", event["error"]["message"])
                    yield event
    except httpx.HTTPError as error:
        raise CoreError("the answer broke off", str(error) or type(error).__name__) from error


def _try_it(server: Server, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "stream": True}
    return (
        f"\nIt stays up at {server.url}/v1 until Ctrl-C. Try:\n\n"
        f"  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f"{shlex.quote(json.dumps(body))}\n"
    )
