"""The page: what a browser is given at `/`, and how it logs in. All that it does goes through the API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from litestar import Response, get, post
from msgspec import Struct

from core.errors import RequestError
from core.gateway.access import OPEN, callers_of
from core.gateway.bodies import AnyRequest, read
from core.gateway.errors import NO_SUCH_PART
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.schemas.decoding import Fields

HTML = "text/html; charset=utf-8"
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": HTML,
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What the page consists of; other files beside these are not served."""

GUARDS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types dompurify",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the page."""

    content: bytes
    kind: str
    tag: str


class LoginBody(Fields):
    """An API key."""

    key: str


class Me(Struct):
    """Who asks. `host` says whether it may do what is the host's: invite machines, and let them in."""

    host: bool
    logged_in: bool


@get("/", opt={OPEN: True, DOCUMENTED: Documentation(str, media=HTML)})
async def page(request: AnyRequest) -> Response[bytes]:
    """The page for browsers."""
    return _given(request, "page.html")


@get("/page/{name:path}", opt={OPEN: True, DOCUMENTED: Documentation(str, media="text/css")})
async def page_part(request: AnyRequest) -> Response[bytes]:
    """A part of the page: a script, a style or a picture."""
    return _given(request, request.path_params["name"].removeprefix("/"))


@get("/v1/me", opt={DOCUMENTED: Documentation(Me)})
async def me(request: AnyRequest) -> Me:
    """Says what whoever asks may do."""
    callers = callers_of(request)
    return Me(callers.of(request.scope).host, callers.logged_in(request.scope) is not None)


@post("/v1/login", status_code=200, opt={OPEN: True, DOCUMENTED: Documentation(Me, LoginBody)})
async def login(request: AnyRequest) -> Response[Me]:
    """Gives a browser a cookie that does what the API key does, for pages of this server alone."""
    callers, body = callers_of(request), await read(request, LoginBody)
    caller, cookie = callers.login(body.key, request.scope)
    return Response(Me(caller.host, logged_in=True), cookies=[cookie])


@post("/v1/logout", status_code=200, opt={OPEN: True, DOCUMENTED: Documentation(Me)})
async def logout(request: AnyRequest) -> Response[Me]:
    """Makes the browser's cookie useless."""
    callers = callers_of(request)
    left = Me(host=callers.serve_here_alone, logged_in=False)
    return Response(left, cookies=[callers.logins.close(request.scope)])


def _given(request: AnyRequest, name: str) -> Response[bytes]:
    part = parts().get(name)
    if part is None:
        raise RequestError("there is no such part of the page", code=NO_SUCH_PART)
    headers = {**GUARDS, "etag": part.tag}
    if request.headers.get("if-none-match") == part.tag:
        return Response(b"", status_code=304, headers=headers)
    return Response(part.content, media_type=part.kind, headers=headers)


@cache
def parts() -> Mapping[str, Part]:
    """By the names that they are asked for. The styles that the tray app's page has, too, lie in core/web."""
    return {
        path: Part(content, kind, f'"{sha256(content).hexdigest()[:16]}"')
        for folder in (files("core") / "web", files("core.gateway") / "web")
        for path, file in _within(folder)
        if (kind := KINDS.get(PurePosixPath(path).suffix)) and (content := file.read_bytes())
    }


def _within(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _within(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry
