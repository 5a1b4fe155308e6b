"""Who asks: API keys, web pages, and the name by which the engine tells clients apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Any, cast

from litestar import Request
from litestar.config.cors import CORSConfig
from litestar.datastructures import Cookie, Headers
from litestar.types import ASGIApp, Receive, Scope, Send

from core.errors import RequestError
from core.gateway.errors import Forbidden, HostOnly, Unauthorized
from core.gateway.logins import Logins
from core.gateway.settings import ApiSettings

OPEN = "open"
"""The option of a route that needs no key."""

HOST = "host"
"""The option of a route that is for the host alone."""

_UNKNOWN_KEY = "the API key is missing or wrong"

_HERE = re.compile(
    r"(\[[0-9a-f:.]+\]|[0-9.]+|localhost|[\w.-]+\.localhost|host\.(docker|containers)\.internal)(:\d+)?", re.IGNORECASE
)
"""What a Host header may be where this machine alone is served: an address, a name that no stranger can give an
address, or the one by which a container knows its machine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is the one by which the engine tells clients apart; `host` may do what is the host's."""

    name: str
    host: bool


class Callers:
    """Tells who asks: by an API key, by the cookie of a login that had one, or else by address."""

    def __init__(self, settings: ApiSettings) -> None:
        self.logins = Logins()
        self._settings = settings
        self._digests = [_digest(key) for key in settings.keys]

    @property
    def need_keys(self) -> bool:
        return self._settings.had_keys and not self._settings.allow_anonymous

    @property
    def serve_here_alone(self) -> bool:
        return not (self.need_keys or self._settings.allow_anonymous)

    def of(self, scope: Scope) -> Caller:
        """Raises Unauthorized for a key that is missing or wrong, where one is needed."""
        if caller := self._by_key(_digest(_key(scope))) or self.logged_in(scope):
            return caller
        if self.need_keys and not scope["route_handler"].opt.get(OPEN):
            raise Unauthorized(
                _UNKNOWN_KEY,
                hint="send one that the host made with `core keys add NAME`, as 'Authorization: Bearer KEY'",
            )
        return Caller(f"address {scope['client'][0]}" if scope["client"] else "", self.serve_here_alone)

    def logged_in(self, scope: Scope) -> Caller | None:
        return self._by_key(self.logins.key(scope))

    def login(self, key: str, scope: Scope) -> tuple[Caller, Cookie]:
        """Whoever has `key`, and the cookie for it. Raises Unauthorized, or RequestError where there are no keys."""
        if not self._settings.had_keys:
            raise RequestError("this server has no API keys", hint="ask without one", param="key")
        digest = _digest(key)
        if caller := self._by_key(digest):
            return caller, self.logins.open(digest, scope)
        raise Unauthorized(_UNKNOWN_KEY, hint="enter one that the host made with `core keys add NAME`")

    def _by_key(self, digest: bytes) -> Caller | None:
        known = [compare_digest(digest, each) for each in self._digests]
        if any(known):
            return Caller(f"key {digest.hex()[:16]}", host=False)
        named = self._settings.named_keys.holder(digest) if self._settings.named_keys else None
        return Caller(f"key of {named.name}", named.host) if named else None


class Access:
    """Middleware. Sets the scope's `auth` to the client's name.

    Raises Unauthorized for a key that is missing or wrong, where there are keys; Forbidden for a web page of an origin
    that `cors` does not allow, and for one that came here by a trick of DNS, where no key would stop it; HostOnly for
    what is the host's, to anybody else.
    """

    def __init__(self, app: ASGIApp, callers: Callers, cors: CORSConfig | None) -> None:
        self._app = app
        self._callers = callers
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refuse_pages(Headers.from_scope(scope))
        caller = self._callers.of(scope)
        scope["auth"] = caller.name
        if scope["route_handler"].opt.get(HOST) and not caller.host:
            raise HostOnly(
                "this is for the host alone",
                "it needs a key of the host's own",
                "make one with `core keys add NAME --host`, or use `core invite` and `core members`",
            )
        await self._app(scope, receive, send)

    def _refuse_pages(self, headers: Headers) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if self._callers.serve_here_alone and not _HERE.fullmatch(host):
            raise Forbidden(
                f"without an API key this server answers to no {host!r}",
                "a web page may have given its own name this machine's address",
                "ask by an address or as localhost; or give the server an API key, or --allow-anonymous-api",
            )
        if origin is None or headers.get("sec-fetch-site") == "same-origin" or origin.partition("://")[2] == host:
            return
        if self._cors is None or not self._cors.is_origin_allowed(origin):
            raise Forbidden(f"pages of {origin} may not ask", hint="the server's option --cors-origin lets them")


def callers_of(request: Request[Any, Any, Any]) -> Callers:
    return cast(Callers, request.app.state.callers)


def _key(scope: Scope) -> str:
    """Of OpenAI's clients, or of Anthropic's, some of which have a header of their own."""
    headers = Headers.from_scope(scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
