"""A generation as an HTTP answer: one JSON object, or server-sent events as they come.

Shapes follow the OpenAI API reference; framing is that of server-sent events (html.spec.whatwg.org).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from core.gateway.bridge import Bridge, Crossing, while_connected
from core.gateway.errors import explain
from core.interfaces.engine import Delta, Engine, FinishReason, Generation, GenerationRequest

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """One server-sent event; JSON has no line breaks of its own."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(slots=True)
class Wording:
    """How one answer of an endpoint words itself."""

    model: str
    id: str = field(init=False)
    created: int = field(init=False)

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, text: str, finish_reason: FinishReason | None, usage: dict[str, int]) -> dict[str, Any]:
        return self._object(self.whole_object, [self._choice(self._said(text), finish_reason)], usage=usage)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self._object(self.chunk_object, choices, **more)

    def opening(self) -> list[dict[str, Any]]:
        """The choices of a chunk that comes before any text, if there is one."""
        return []

    def step(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(self._says(delta.text), delta.finish_reason)]

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}

    def _choice(self, content: dict[str, Any], finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _said(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _says(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWording(Wording):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _says = _said


class ChatWording(Wording):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"delta": {"role": "assistant", "content": ""}}, None)]

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _says(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


@dataclass(slots=True)
class Answer:
    """An ASGI application that answers one request: it runs the generation for as long as the client is there.

    The generation is entered before the first header goes out, so that whatever refuses it is a plain HTTP error.
    """

    engine: Engine
    bridge: Bridge
    request: GenerationRequest
    wording: Wording
    stream: bool
    include_usage: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.bridge.open(self.engine.generate, self.request) as generation:
            if self.stream:
                await _send_stream(self._events(generation), send)
            else:
                await ASGIResponse(body=await self._whole(generation))(scope, receive, send)

    async def _whole(self, generation: Crossing[Generation]) -> bytes:
        deltas = [delta async for delta in generation]
        text = "".join(delta.text for delta in deltas)
        usage = _usage(generation.value.prompt_tokens, deltas[-1].tokens)
        return msgspec.json.encode(self.wording.whole(text, deltas[-1].finish_reason, usage))

    async def _events(self, generation: Crossing[Generation]) -> AsyncIterator[bytes]:
        no_usage = {"usage": None} if self.include_usage else {}
        tokens = 0
        try:
            if opening := self.wording.opening():
                yield event(self.wording.chunk(opening, **no_usage))
            async for delta in generation:
                tokens = delta.tokens
                if delta.text or delta.finish_reason:
                    yield event(self.wording.chunk(self.wording.step(delta), **no_usage))
            if self.include_usage:
                yield event(self.wording.chunk([], usage=_usage(generation.value.prompt_tokens, tokens)))
            yield DONE
        except Exception as error:
            yield event(explain(error).body())


async def _send_stream(events: AsyncIterator[bytes], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    async for each in events:
        await send({"type": "http.response.body", "body": each, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
