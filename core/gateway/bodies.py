"""Requests' bodies: from what comes over HTTP to the fields of an endpoint."""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias, TypeVar

from litestar import Request
from litestar.exceptions import HTTPException, InternalServerException

from core.errors import RequestError
from core.gateway.schemas.decoding import Fields, decode

BODY_LIMIT = 10 * 1024 * 1024
"""Bytes, also of what a compressed one unpacks to."""
_GZIP = 16 + zlib.MAX_WBITS

AnyRequest: TypeAlias = Request[Any, Any, Any]
F = TypeVar("F", bound=Fields)


async def read(request: AnyRequest, kind: type[F]) -> F:
    """The request's body as `kind`. Raises RequestError or HTTPException for what is none."""
    if request.content_type[0] not in ("application/json", ""):
        raise HTTPException(status_code=415, detail=f"the body must be application/json, not {request.content_type[0]}")
    try:
        body = await request.body()
    except InternalServerException as error:
        raise RequestError("the client left before its request was complete") from error
    return decode(_unpacked(body, request.headers.get("content-encoding", "identity").strip().lower()), kind)


def _unpacked(body: bytes, encoding: str) -> bytes:
    match encoding:
        case "identity" | "":
            return body
        case "gzip" | "x-gzip":
            return _from_gzip(body)
    raise HTTPException(status_code=415, detail=f"the body may come as it is or as gzip, not as {encoding}")


def _from_gzip(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP)
    try:
        whole = unpacking.decompress(body, BODY_LIMIT)
    except zlib.error as error:
        raise RequestError("the body is not gzip", str(error), code="invalid_json") from error
    if unpacking.unconsumed_tail:
        raise HTTPException(status_code=413, detail=f"the body unpacks to more than {BODY_LIMIT} bytes")
    if not unpacking.eof or unpacking.unused_data:
        raise RequestError("the body is not gzip", "it is cut short, or goes on behind its end", code="invalid_json")
    return whole
