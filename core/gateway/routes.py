"""The endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from litestar import Request, Response, get, post
from litestar.exceptions import HTTPException, InternalServerException
from litestar.types import ASGIApp

from core.errors import RequestError
from core.gateway.answers.answer import Answer
from core.gateway.answers.chat import ChatWording
from core.gateway.answers.completions import CompletionWording
from core.gateway.answers.wording import OpenAIWording
from core.gateway.bridge import Bridge
from core.gateway.errors import MODEL_NOT_FOUND, RETRY_AFTER
from core.gateway.schemas.chat import ChatBody
from core.gateway.schemas.common import Body
from core.gateway.schemas.completions import CompletionBody
from core.gateway.schemas.decoding import decode
from core.interfaces.engine import ClusterStatus, Engine

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the endpoints work with; `model` and `created` were read from the engine in trio."""

    engine: Engine
    bridge: Bridge
    model: str
    created: int

    def card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "core"}

    def check(self, model: str) -> None:
        if model != self.model:
            raise RequestError(
                f"the model {model!r} does not exist here",
                hint=f"this cluster serves {self.model!r}",
                param="model",
                code=MODEL_NOT_FOUND,
            )

    def answer(self, body: Body, kind: type[OpenAIWording]) -> Answer:
        self.check(body.model)
        requests = body.generations()
        wording = kind(self.model, len(requests), body.n, body.include_usage)
        return Answer(self.engine, self.bridge, requests, wording, body.stream)

    async def status(self) -> ClusterStatus:
        return await self.bridge.call(self.engine.status)


AnyRequest = Request[Any, Any, Any]


def _gateway(request: AnyRequest) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


@get("/v1/models")
async def models(request: AnyRequest) -> dict[str, Any]:
    return {"object": "list", "data": [_gateway(request).card()]}


@get("/v1/models/{name:path}")
async def model(request: AnyRequest) -> dict[str, Any]:
    gateway = _gateway(request)
    gateway.check(request.path_params["name"].removeprefix("/"))
    return gateway.card()


@post("/v1/completions", status_code=200)
async def completions(request: AnyRequest) -> ASGIApp:
    return _gateway(request).answer(await _read(request, CompletionBody), CompletionWording)


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: AnyRequest) -> ASGIApp:
    return _gateway(request).answer(await _read(request, ChatBody), ChatWording)


@get("/health")
async def health(request: AnyRequest) -> Response[dict[str, Any]]:
    """200 where a request would be served, else 503 with what the cluster waits for."""
    status = await _gateway(request).status()
    if status.state == "ready":
        return Response({"status": "ok"})
    content = {
        "status": status.state,
        "detail": status.detail,
        "required_nodes": status.required_nodes,
        "ready_nodes": status.ready_nodes,
    }
    return Response(content, status_code=503, headers=RETRY_AFTER)


@get("/v1/cluster")
async def cluster(request: AnyRequest) -> ClusterStatus:
    return await _gateway(request).status()


async def _read(request: AnyRequest, kind: type[B]) -> B:
    if request.content_type[0] not in ("application/json", ""):
        raise HTTPException(status_code=415, detail=f"the body must be application/json, not {request.content_type[0]}")
    try:
        body = await request.body()
    except InternalServerException as error:
        raise RequestError("the client left before its request was complete") from error
    return decode(body, kind)
