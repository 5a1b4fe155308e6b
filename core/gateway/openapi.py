"""The OpenAPI document of the API, from what stands at each route (spec.openapis.org/oas/v3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import getdoc
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler

from core.gateway.access import OPEN
from core.gateway.errors import ErrorBody
from core.gateway.schemas.decoding import Fields, idle_values

DOCUMENTED = "documented"
"""The option of a route that has its Documentation."""

JSON, TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"
ABOUT = """\
Follows the OpenAI API. Fields that a schema doesn't name are refused, but for those of the OpenAI API and of other
servers that ask for nothing, which each body lists. `HEAD` is answered wherever `GET` is, and a body may come as gzip.
The events of a stream end with `data: [DONE]`, or with an error;
those of a response with one that says how it ended. Between events that take long come comments (`: waiting`)."""

_FAILURES = {
    400: "The request is malformed, or asks for what can't be had.",
    401: "The API key is missing or wrong.",
    403: "A web page asks that may not.",
    404: "There is no such model or endpoint, or what is named is not kept here (any more).",
    408: "The client does not read.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "As much runs as the cluster takes at once.",
    500: "A defect of the server.",
    503: "The cluster is not ready, or lost a node.",
    504: "The time was up before the answer began.",
}
_RETRY = {"Retry-After": {"description": "In so many seconds.", "schema": {"type": "integer"}}}


@dataclass(frozen=True, slots=True)
class Documentation:
    """Types of an answer (`media` is what it comes as), of the request's body and of a stream's events, as there are.

    `others` are answers with another status than 200 whose body is no error.
    """

    answer: Any = None
    body: Any = None
    events: tuple[Any, ...] = ()
    media: str = JSON
    others: Mapping[int, Any] = field(default_factory=dict)

    @property
    def types(self) -> list[Any]:
        return [kind for kind in (self.answer, self.body, *self.events, *self.others.values()) if kind is not None]


def document(handlers: Iterable[HTTPRouteHandler], keys_needed: bool) -> bytes:
    """The document of those handlers' routes, as JSON; each has its Documentation as an option."""
    documented = [(handler, handler.opt[DOCUMENTED]) for handler in handlers]
    types = {kind for _, each in documented for kind in each.types} | {ErrorBody}
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    for kind in types:
        if isinstance(kind, type) and issubclass(kind, Fields) and kind.idle:
            components[kind.__name__]["description"] += _idle(kind)
    paths: dict[str, dict[str, Any]] = {}
    for handler, each in documented:
        (path,), (method,) = handler.paths, handler.http_methods
        operation = _operation(handler, each, schema_of, keys_needed)
        paths.setdefault(re.sub(r":\w+}", "}", path), {})[method.lower()] = operation
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "core", "version": version("core-cluster"), "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _failure(status, [schema_of[ErrorBody]]) for status in _FAILURES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole, order="deterministic")


def _operation(
    handler: HTTPRouteHandler, documentation: Documentation, schema_of: Mapping[Any, Any], keys_needed: bool
) -> dict[str, Any]:
    names = re.findall(r"{(\w+):", next(iter(handler.paths)))
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    content = {}
    if documentation.answer is not None:
        content[documentation.media] = {"schema": schema_of[documentation.answer]}
    if documentation.events:
        kinds = [*documentation.events, ErrorBody]
        content[_EVENTS] = {"schema": _event([schema_of[kind] for kind in kinds])}
    failures = _FAILURES if documentation.body or names else _FAILURES.keys() & {400, 401, 403, 500, 503}
    answers = documentation.answer is not None or documentation.events
    responses = {str(status): {"$ref": f"#/components/responses/{status}"} for status in failures}
    for status, kind in documentation.others.items():
        responses[str(status)] = _failure(status, [schema_of[kind], schema_of[ErrorBody]])
    operation: dict[str, Any] = {
        "operationId": handler.handler_name.rpartition(".")[2],
        "summary": getdoc(handler.fn),
        "security": [{"key": []}] if keys_needed and not handler.opt.get(OPEN) else [],
        "parameters": parameters,
        "responses": responses | ({"200": {"description": "The answer.", "content": content}} if answers else {}),
    }
    if documentation.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema_of[documentation.body]}},
        }
    return operation


def _idle(body: type[Fields]) -> str:
    accepted = [f"`{name}` {idle_values(values)}" for name, values in sorted(body.idle.items())]
    return f"\n\nOf other fields it takes those values that ask for nothing: {'; '.join(accepted)}."


def _event(schemas: list[Any]) -> dict[str, Any]:
    """The schema of a server-sent event: its data are JSON, or the word that ends a stream."""
    data = {"contentMediaType": JSON, "contentSchema": {"anyOf": schemas}}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
    }


def _failure(status: int, schemas: list[Any]) -> dict[str, Any]:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    headers = {"headers": _RETRY} if status in (429, 503) else {}
    return {"description": _FAILURES[status], "content": {JSON: {"schema": schema}}} | headers
