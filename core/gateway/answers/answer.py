"""An answer on its way: one JSON object, or server-sent events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from core.errors import DeadlineExceeded, RequestError
from core.gateway.answers.generations import Outcome, Step, generate_all
from core.gateway.answers.wording import Wording
from core.gateway.bridge import Bridge, while_connected
from core.gateway.errors import explain
from core.interfaces.engine import Delta, Engine, GenerationRequest

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(slots=True)
class Answer:
    """An ASGI application that answers one request: it runs the generations for as long as the client is there.

    They are admitted before the first header goes out, so that whatever refuses one is a plain HTTP error.
    `grammar_field` is the request's field from which the generations' grammar came, if they have one.
    """

    engine: Engine
    bridge: Bridge
    requests: tuple[GenerationRequest, ...]
    wording: Wording
    stream: bool
    grammar_field: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._answer(scope, receive, send))
        except RequestError as error:
            raise self._naming_the_field(error) from error

    def _naming_the_field(self, error: RequestError) -> RequestError:
        """The engine knows no fields of tools, and one name for the field of a format."""
        if self.grammar_field is None or error.param not in (None, "response_format"):
            return error
        return RequestError(error.title, error.message, error.hint, param=self.grammar_field, code=error.code)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.bridge.open(generate_all, self.engine, self.requests) as generated:
            steps = in_time(generated, len(self.requests), self.wording)
            if self.stream:
                await send_stream(self._events(steps), send)
            else:
                await ASGIResponse(body=await self._whole(steps))(scope, receive, send)

    async def _whole(self, steps: AsyncIterator[Step]) -> bytes:
        outcomes: dict[int, Outcome] = {}
        async for step in steps:
            outcomes.setdefault(step.index, Outcome(step.generation)).deltas.append(step.delta)
        return msgspec.json.encode(self.wording.whole([outcomes[index] for index in sorted(outcomes)]))

    async def _events(self, steps: AsyncIterator[Step]) -> AsyncIterator[bytes]:
        try:
            for each in self.wording.opening():
                yield each
            async for step in steps:
                for each in self.wording.step(step):
                    yield each
            for each in self.wording.closing():
                yield each
        except Exception as error:
            for each in self.wording.failed(explain(error)):
                yield each


async def in_time(steps: AsyncIterator[Step], choices: int, wording: Wording) -> AsyncIterator[Step]:
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
        wording.out_of_time = True
        for step in last.values():
            if step.delta.finish_reason is None:
                yield replace(step, delta=Delta("", step.delta.tokens, "length"))


async def send_stream(events: AsyncIterator[bytes], send: Send) -> None:
    """Server-sent events, framed already, as the body of an answer."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    async for each in events:
        await send({"type": "http.response.body", "body": each, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
