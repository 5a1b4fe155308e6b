"""The endpoints of Ollama's API, for programs that know no other: the same engine, in its words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from core.errors import RequestError
from core.gateway.answers.answer import send_stream
from core.gateway.answers.ollama import OllamaFormatter, now
from core.gateway.bodies import AnyRequest, read
from core.gateway.dialects.forms import ToolSettings
from core.gateway.dialects.reader import Reader
from core.gateway.dialects.template import template_of
from core.gateway.errors import NO_EMBEDDINGS, SHAPE, Failure, OllamaErrorBody
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.routes import Gateway, gateway_of
from core.gateway.schemas.ollama import (
    AnswerMessage,
    Details,
    Line,
    ListedModel,
    ListedModels,
    ModelRef,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    Pulled,
    Shown,
    Version,
)
from core.interfaces.engine import ClusterStatus, ModelCard

API_VERSION = "0.12.6"
"""Of the Ollama whose API this follows: its clients look at it for what they may ask."""
_LATEST = ":latest"


def _options(documentation: Documentation) -> dict[str, Any]:
    return {SHAPE: Failure.ollama_body, DOCUMENTED: documentation}


@post("/api/chat", status_code=200, opt=_options(Documentation(Line, OllamaChatBody, streams_lines=True)))
async def chat(request: AnyRequest) -> ASGIApp:
    """Continues a conversation, as Ollama's API has it."""
    return await _answer(request, await read(request, OllamaChatBody), chats=True)


@post("/api/generate", status_code=200, opt=_options(Documentation(Line, OllamaGenerateBody, streams_lines=True)))
async def generate(request: AnyRequest) -> ASGIApp:
    """Answers a prompt, as Ollama's API has it."""
    return await _answer(request, await read(request, OllamaGenerateBody), chats=False)


async def _answer(request: AnyRequest, body: OllamaBody, *, chats: bool) -> ASGIApp:
    gateway = gateway_of(request)
    _check(gateway, body.model)
    if body.only_loads:
        return _Lines(_loaded(gateway.model, chats=chats), body.stream)
    requests = (body.generation(request.auth, await gateway.deadline(None)),)
    prompt = requests[0].prompt
    if isinstance(prompt, str):
        return gateway.answer(body, requests, OllamaFormatter(gateway.model, Reader(), chats=chats))
    dialect = await gateway.dialect(body, prompt, request.auth)
    return gateway.answer(body, requests, OllamaFormatter(gateway.model, dialect.reader(), chats=chats), dialect)


@get("/api/version", opt=_options(Documentation(Version)))
async def version(request: AnyRequest) -> Version:
    """Tells which Ollama's API this follows."""
    return Version(API_VERSION)


@get("/api/tags", opt=_options(Documentation(ListedModels)))
async def tags(request: AnyRequest) -> ListedModels:
    """Lists the one model."""
    gateway = gateway_of(request)
    return _listed(gateway, await gateway.status())


@get("/api/ps", opt=_options(Documentation(ListedModels)))
async def ps(request: AnyRequest) -> ListedModels:
    """Lists the one model, if it is loaded."""
    gateway = gateway_of(request)
    status = await gateway.status()
    return _listed(gateway, status) if status.state == "ready" else ListedModels([])


@post("/api/show", status_code=200, opt=_options(Documentation(Shown, ModelRef)))
async def show(request: AnyRequest) -> Shown:
    """Describes the model."""
    gateway, body = gateway_of(request), await read(request, ModelRef)
    _check(gateway, body.model or body.name)
    card, status = await gateway.card(), await gateway.status()
    template = card.chat_template.source if card.chat_template else ""
    info = {
        "general.architecture": "core",
        "core.context_length": card.context_length,
        "core.block_count": status.layers,
    }
    return Shown(_created(gateway), template, _details(status), info, _capabilities(card, gateway.tools))


@post("/api/pull", status_code=200, opt=_options(Documentation(Pulled, ModelRef, streams_lines=True)))
async def pull(request: AnyRequest) -> ASGIApp:
    """Says that the model is here, if it is the one that this cluster serves."""
    gateway, body = gateway_of(request), await read(request, ModelRef)
    _check(gateway, body.model or body.name)
    return _Lines(Pulled("success"), body.stream)


@post("/api/embed", opt=_options(Documentation(others={404: OllamaErrorBody})))
async def embed(request: AnyRequest) -> None:
    """Says that there are none: the model writes text."""
    raise RequestError("this server makes no embeddings", "its model writes text", code=NO_EMBEDDINGS)


class _Lines:
    """An ASGI application: an answer of one object, which is a stream's only line."""

    def __init__(self, answer: msgspec.Struct, stream: bool) -> None:
        self._text = msgspec.json.encode(answer)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await send_stream(self._lines(), send, media=OllamaFormatter.media)
        else:
            await ASGIResponse(body=self._text)(scope, receive, send)

    async def _lines(self) -> AsyncIterator[bytes]:
        yield self._text + b"\n"


def _listed(gateway: Gateway, status: ClusterStatus) -> ListedModels:
    size = sum(status.planning.weight_bytes) if status.planning else 0
    return ListedModels([ListedModel(gateway.model, gateway.model, _created(gateway), size, _details(status))])


def _loaded(model: str, *, chats: bool) -> Line:
    line = Line(model=model, created_at=now(), done=True, done_reason="load")
    if chats:
        line.message = AnswerMessage("assistant", "")
    else:
        line.response = ""
    return line


def _check(gateway: Gateway, model: str) -> None:
    """Ollama's names may end with the tag of the latest version."""
    gateway.check(model if model == gateway.model else model.removesuffix(_LATEST))


def _created(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.created, UTC).isoformat().replace("+00:00", "Z")


def _details(status: ClusterStatus) -> Details:
    return Details(family="core", quantization_level=status.quant, families=("core",))


def _capabilities(card: ModelCard, tools: ToolSettings) -> list[str]:
    capabilities = ["completion"]
    if card.tool_template is not None and template_of(card.tool_template, tools).takes_tools:
        capabilities.append("tools")
    if card.chat_template is not None and template_of(card.chat_template, tools).thinks:
        capabilities.append("thinking")
    return capabilities
