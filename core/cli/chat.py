"""core chat: a conversation with the cluster in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from core.cli.api_client import blocking_client, checked, no_answer
from core.cli.console import interruptible
from core.cli.options import ApiUrl
from core.errors import CoreError
from core.one_line import one_line

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A server that lives sends a comment every few seconds."""
HELP = """\
/system TEXT   what the model is told before all else; without TEXT nothing
/new           begins another conversation
/quit          ends, as Ctrl-D does
Ctrl-C         stops an answer; what came of it stays"""


def chat(
    url: ApiUrl = "http://127.0.0.1:8000",
    system: Annotated[str, typer.Option(help="What the model is told before all else.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="0 is always the likeliest token. Default: the model's own.", min=0, max=2)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of each answer, at most.", min=1)] = None,
) -> None:
    """Chat with a running cluster. The API key, if it needs one, is taken from CORE_API_KEY."""
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    with blocking_client(url, timeout) as client, interruptible():
        try:
            model = checked(client.get("/v1/models"), "data")["data"][0]["id"]
        except httpx.HTTPError as error:
            raise no_answer(client.base_url, error) from error
        _say(f"{model}; /help tells what else there is")
        talk = Talk(client, model, {name: value for name, value in sampling.items() if value is not None}, system)
        for line in _lines():
            if not talk.take(line):
                return


@dataclass(slots=True)
class Talk:
    """A conversation: what was said, and how it is asked for."""

    client: httpx.Client
    model: str
    sampling: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)

    def take(self, line: str) -> bool:
        """Does what `line` says. False: that is to end."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                return True
            case "/quit":
                return False
            case "/new":
                self.said.clear()
                _say("another conversation begins")
            case "/system":
                self.system = rest.strip()
                _say("the model is told that from now on" if self.system else "the model is told nothing before")
            case _ if command.startswith("/"):
                _say(HELP)
            case _:
                self._ask(line)
        return True

    def _ask(self, text: str) -> None:
        """What fails is said, and is not part of the conversation."""
        question = {"role": "user", "content": text}
        answer = ""
        try:
            for piece in self._answer([*self.said, question]):
                answer += piece
        except KeyboardInterrupt:
            _say("\nstopped")
        except httpx.HTTPError as error:
            _say(f"\n{one_line(str(no_answer(self.client.base_url, error)))}")
        except CoreError as error:
            _say(one_line(str(error)))
        if answer:
            self.said += [question, {"role": "assistant", "content": answer}]

    def _answer(self, said: list[dict[str, str]]) -> Iterator[str]:
        """The text as it comes, which is shown; thoughts are shown and are not part of it."""
        told = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": told + said, "stream": True, **self.sampling}
        body["stream_options"] = {"include_usage": True}
        began, first = time.monotonic(), 0.0
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                checked(answer, "choices")
            for event in _events(answer):
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    thought, text = delta.get("reasoning_content", ""), delta.get("content") or ""
                    if (thought or text) and not first:
                        first = time.monotonic()
                    _show(thought, dim=True)
                    _show(text)
                    yield text
                if usage := event.get("usage"):
                    _say(_figures(usage["completion_tokens"], first - began, time.monotonic() - first))


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises CoreError for one that is an error; what is waited for is said."""
    for line in answer.iter_lines():
        if line.startswith(": waiting: "):
            _say(f"\nthe answer waits, and goes on by itself: {one_line(line.removeprefix(': waiting: '))}")
        elif line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise CoreError("the answer broke off", event["error"]["message"])
            yield event


def _figures(tokens: int, first: float, rest: float) -> str:
    speed = f", {(tokens - 1) / rest:.1f} tokens/s" if tokens > 1 and rest > 0 else ""
    return f"\n{tokens} tokens{speed}, the first after {first:.2f} s"


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-D or Ctrl-C; with a history where the terminal has one."""
    shown = "> " if sys.stdin.isatty() else ""
    if shown:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() has a history from then on
    while True:
        try:
            yield input(shown)
        except (EOFError, KeyboardInterrupt):
            _say("")
            return


def _show(text: str, *, dim: bool = False) -> None:
    """A model's words may not steer the terminal."""
    safe = "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    if safe:
        print(f"\x1b[2m{safe}\x1b[22m" if dim and sys.stdout.isatty() else safe, end="", flush=True)


def _say(text: str) -> None:
    """What is not the model's stands apart: a pipe takes answers alone."""
    print(text, file=sys.stderr, flush=True)
