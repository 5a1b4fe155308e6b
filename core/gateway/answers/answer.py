"""An answer on its way: one JSON object, or server-sent events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from core.errors import DeadlineExceeded
from core.gateway.answers.formatter import Formatter
from core.gateway.answers.generations import Outcome, Step, generate_all
from core.gateway.bridge import Bridge, closing, while_connected, with_silences
from core.gateway.errors import explain, naming_fields
from core.interfaces.engine import Delta, Engine, GenerationRequest

EVENT_STREAM = (b"content-type", Formatter.media)
SILENCE = 5.0
"""Seconds without an event after which a stream sends a comment, so that nobody on the way takes it for dead."""
LOOK = 1.0
"""Seconds without an event after which it is looked whether there is a new reason for that to tell."""
COMMENT = b": waiting\n\n"
"""Readers of server-sent events pass over it."""


@dataclass(slots=True)
class Answer:
    """An ASGI application that answers one request: it runs the generations for as long as the client is there.

    They are admitted before the first header goes out, so that whatever refuses one is a plain HTTP error.
    `names` are the endpoint's own of the engine's fields: see `naming_fields`.
    """

    engine: Engine
    bridge: Bridge
    requests: tuple[GenerationRequest, ...]
    formatter: Formatter
    stream: bool
    names: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with naming_fields(self.names):
            await while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.bridge.open(generate_all, self.engine, self.requests) as generated:
            steps = in_time(generated, len(self.requests), self.formatter)
            if self.stream:
                await send_stream(self._events(steps), send, lambda: generated.value.waits_for, self.formatter.media)
            else:
                await ASGIResponse(body=await self._whole(steps))(scope, receive, send)

    async def _whole(self, steps: AsyncIterator[Step]) -> bytes:
        outcomes: dict[int, Outcome] = {}
        async for step in steps:
            if step.index not in outcomes:
                outcomes[step.index] = Outcome(step.generation)
            outcomes[step.index].deltas.append(step.delta)
        return msgspec.json.encode(self.formatter.whole([outcomes[index] for index in sorted(outcomes)]))

    async def _events(self, steps: AsyncIterator[Step]) -> AsyncIterator[bytes]:
        try:
            for each in self.formatter.opening():
                yield each
            with naming_fields(self.names):
                async for step in steps:
                    for each in self.formatter.step(step):
                        yield each
            for each in self.formatter.closing():
                yield each
        except Exception as error:
            for each in self.formatter.failed(explain(error)):
                yield each


async def in_time(steps: AsyncIterator[Step], choices: int, formatter: Formatter) -> AsyncIterator[Step]:
    """`steps`. Where the deadline cuts them short, each choice ends with what there is of it, if all have begun."""
    last: dict[int, Step] = {}
    try:
        async for step in steps:
            last[step.index] = step
            yield step
    except DeadlineExceeded as error:
        if not last:
            raise
        if len(last) < choices:
            said = f"{len(last)} of its {choices} choices had begun"
            raise DeadlineExceeded(error.title, said, error.hint) from error
        formatter.out_of_time = True
        for step in last.values():
            if step.delta.finish_reason is None:
                yield replace(step, delta=Delta("", step.delta.tokens, "length"))


async def send_stream(
    events: AsyncIterator[bytes],
    send: Send,
    waits_for: Callable[[], str] = lambda: "",
    media: bytes = Formatter.media,
) -> None:
    """Events, framed already, as the body of an answer; server-sent ones with comments when they are silent.

    `waits_for` says why they are, if there is more to say than that.
    """
    headers = [(b"content-type", media), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    events = _with_comments(events, waits_for) if media == Formatter.media else events
    async with closing(events) as told:
        async for each in told:
            await send({"type": "http.response.body", "body": each, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_comments(events: AsyncIterator[bytes], waits_for: Callable[[], str]) -> AsyncIterator[bytes]:
    look = min(LOOK, SILENCE)
    looks, said = 0, ""
    async with closing(with_silences(events, look)) as told:
        async for each in told:
            if each is not None:
                looks, said = 0, ""
                yield each
                continue
            looks, why = looks + 1, waits_for()
            if why != said or looks % round(SILENCE / look) == 0:
                said = why
                yield comment(why)


def comment(why: str) -> bytes:
    return f": waiting: {' '.join(why.split())}\n\n".encode() if why else COMMENT
