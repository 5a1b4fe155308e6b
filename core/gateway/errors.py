"""Every failure, the framework's own included, in the OpenAI API's error shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException
from msgspec import Struct

from core.errors import ConfigError, CoreError, DeadlineExceeded, NotReady, Overloaded, RequestError, RouteError
from core.gateway.schemas.anthropic_objects import AnthropicError, AnthropicErrorBody

MODEL_NOT_FOUND = "model_not_found"
RESPONSE_NOT_FOUND = "response_not_found"
ITEM_NOT_FOUND = "item_not_found"
NO_EMBEDDINGS = "no_embeddings"
NO_SUCH_PART = "no_such_part"
_NOT_FOUND = frozenset({MODEL_NOT_FOUND, RESPONSE_NOT_FOUND, ITEM_NOT_FOUND, NO_EMBEDDINGS, NO_SUCH_PART})
RETRY_AFTER = {"retry-after": "5"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
SHAPE = "shape"
"""The option of a route whose errors have another shape than OpenAI's: what makes it of a Failure."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients, which send again whatever failed with a 5xx, heed it."""

_log = logging.getLogger(__name__)


class ShuttingDown(CoreError):
    """The server is going away under a request."""


class ReaderStalled(CoreError):
    """A client that stays connected but stopped reading its stream."""


class Unauthorized(CoreError):
    """A request without a key that opens the API."""


class Forbidden(CoreError):
    """A request that a web page makes which may not."""


class HostOnly(CoreError):
    """A request for what is the host's, by somebody who may be anybody."""


class ErrorDetail(Struct):
    """`param` is the field that is wrong, `code` what is wrong with it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


class OllamaErrorBody(Struct):
    error: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status, and what the API says with it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))

    def ollama_body(self) -> OllamaErrorBody:
        return OllamaErrorBody(self.message)

    def anthropic_body(self) -> AnthropicErrorBody:
        return AnthropicErrorBody(AnthropicError(_ANTHROPIC_TYPES.get(self.status, "api_error"), self.message))


def explain(error: BaseException) -> Failure:
    """What a client is told of `error`; what it should not see of an unexpected one goes to the log."""
    match error:
        case RequestError():
            status = 404 if error.code in _NOT_FOUND else 400
            return Failure(status, str(error), param=error.param, code=error.code)
        case Unauthorized():
            return Failure(401, str(error), code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        case Forbidden():
            return Failure(403, str(error), code="forbidden_page")
        case HostOnly():
            return Failure(403, str(error), code="host_only")
        case ConfigError():
            return Failure(400, str(error), code="not_possible")
        case NotReady():
            return _unavailable("cluster_not_ready", _not_ready(error))
        case RouteError():
            return _unavailable("route_lost", _route_lost(error))
        case Overloaded():
            return Failure(429, str(error), type="overloaded", code="overloaded", headers=RETRY_AFTER)
        case DeadlineExceeded():
            kind = "deadline_exceeded"
            return Failure(504, _too_late(error), type=kind, code=kind, headers=NO_RETRY)
        case ShuttingDown():
            return _unavailable("server_shutting_down", str(error))
        case RecursionError():
            return Failure(400, "the request is nested too deeply", code="invalid_value")
        case ReaderStalled():
            return Failure(408, str(error), type="reader_stalled", code="reader_stalled")
        case CoreError():
            _log.error("a request failed: %s", error, exc_info=error)
            return Failure(500, str(error), type="server_error")
        case HTTPException() if error.status_code < 500:
            return Failure(error.status_code, error.detail, headers=error.headers or {})
        case _:
            _log.error("a request failed unexpectedly", exc_info=error)
            return Failure(500, "The server had an error while processing the request.", type="server_error")


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[Struct]:
    """Litestar's exception handler for everything that fails before an answer started."""
    failure = explain(error)
    if isinstance(error, HTTPException):
        failure = replace(failure, message=f"{request.method} {request.scope['path']}: {failure.message}")
    handler = request.scope.get("route_handler")
    shape = handler.opt.get(SHAPE, Failure.body) if handler is not None else Failure.body
    return Response(shape(failure), status_code=failure.status, headers=dict(failure.headers))


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """What the engine refuses in the block is refused by the names that the endpoint has for the engine's fields.

    `names` are those that differ, by the engine's.
    """
    try:
        yield
    except RequestError as error:
        param = names.get(error.param or "", error.param)
        raise RequestError(error.title, error.message, error.hint, param=param, code=error.code) from error


def _unavailable(kind: str, message: str) -> Failure:
    return Failure(503, message, type=kind, code=kind, headers=RETRY_AFTER)


def _not_ready(error: NotReady) -> str:
    counts = f"Required nodes: {error.required}, connected ready nodes: {error.ready}"
    reason = f". {error.message}. Try again later." if error.message else ""
    return f"Model is not ready. {counts}{reason}"


def _too_late(error: DeadlineExceeded) -> str:
    more = "allow it more time with 'max_time', within the server's --max-time"
    return str(DeadlineExceeded(error.title, error.message, f"{error.hint}, or {more}" if error.hint else more))


def _route_lost(error: RouteError) -> str:
    text = str(error)
    lost = {"node": error.node, "layers": error.layers}
    unsaid = [f"{what} {name}" for what, name in lost.items() if name and name not in text]
    where = f" ({', '.join(unsaid)})" if unsaid else ""
    again = "" if error.hint else ". Send the request again."
    return f"{text}{where}{again}"
