"""The endpoints of responses: made, kept for a while, asked for again, and deleted."""

from __future__ import annotations

from functools import partial

from litestar import Response, delete, get, post
from litestar.types import ASGIApp

from core.errors import RequestError
from core.gateway.answers.responses import ResponseFormatter
from core.gateway.bodies import AnyRequest, read
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.routes import gateway_of
from core.gateway.schemas.response_objects import Event, ResponseDeleted, ResponseObject
from core.gateway.schemas.responses import InputBody, InputTokens, ResponseBody


@post("/v1/responses", status_code=200, opt={DOCUMENTED: Documentation(ResponseObject, ResponseBody, (Event,))})
async def responses(request: AnyRequest) -> ASGIApp:
    """Answers an input, and keeps the response for a while unless `store` is false."""
    gateway, body = gateway_of(request), await read(request, ResponseBody)
    gateway.check(body.model)
    keeps = gateway.memory.wants(body.store)
    items = gateway.memory.resolve(request.auth, body.previous_response_id, body.given())
    requests = (body.generation(items, request.auth, await gateway.deadline(body.max_time)),)
    dialect = await gateway.dialect(body, requests[0].prompt, request.auth)
    keep = partial(gateway.memory.keep, request.auth, items) if keeps else None
    return gateway.answer(body, requests, ResponseFormatter(gateway.model, body, dialect.reader(), keep), dialect)


@post("/v1/responses/input_tokens", status_code=200, opt={DOCUMENTED: Documentation(InputTokens, InputBody)})
async def input_tokens(request: AnyRequest) -> InputTokens:
    """Counts the tokens of the prompt that an input would make."""
    gateway, body = gateway_of(request), await read(request, InputBody)
    gateway.check(body.model)
    items = gateway.memory.resolve(request.auth, body.previous_response_id, body.given())
    return InputTokens(input_tokens=await gateway.count(body, body.conversation(items), request.auth))


@get("/v1/responses/{response_id:str}", opt={DOCUMENTED: Documentation(ResponseObject)})
async def response(request: AnyRequest) -> Response[bytes]:
    """Tells a response that is kept once more, as a whole."""
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            raise RequestError(f"'{name}' is not supported here", "a kept response is told as a whole", param=name)
    kept = gateway_of(request).memory.get(request.auth, request.path_params["response_id"])
    return Response(kept.response, media_type="application/json")


@delete("/v1/responses/{response_id:str}", status_code=200, opt={DOCUMENTED: Documentation(ResponseDeleted)})
async def delete_response(request: AnyRequest) -> ResponseDeleted:
    """Forgets a response that is kept."""
    response_id = request.path_params["response_id"]
    gateway_of(request).memory.delete(request.auth, response_id)
    return ResponseDeleted(id=response_id)
