"""Who asks: API keys, web pages, and the name by which the engine tells clients apart."""

from __future__ import annotations

import re
from hashlib import sha256
from hmac import compare_digest
from typing import Any, cast

from litestar import Request
from litestar.config.cors import CORSConfig
from litestar.datastructures import Headers
from litestar.types import ASGIApp, Receive, Scope, Send

from core.errors import RequestError
from core.gateway.errors import Forbidden, HostOnly, Unauthorized
from core.gateway.logins import Logins
from core.gateway.settings import ApiSettings

OPEN = "open"
"""The option of a route that needs no key."""

HOST = "host"
"""The option of a route that is for the host alone."""


_HERE = re.compile(
    r"(\[[0-9a-f:.]+\]|[0-9.]+|localhost|[\w.-]+\.localhost|host\.(docker|containers)\.internal)(:\d+)?", re.IGNORECASE
)
"""What a Host header may be where this machine alone is served: an address, a name that no stranger can give an
address, or the one by which a container knows its machine."""


class Callers:
    """Tells who asks: by an API key, by the cookie of a login that had one, or else by address."""

    def __init__(self, settings: ApiSettings) -> None:
        self.logins = Logins()
        self.serves_here_alone = not (settings.keys or settings.allow_anonymous)
        self._digests = [_digest(key) for key in settings.keys]

    def name(self, scope: Scope) -> str:
        """By which the engine tells clients apart: a hash of the key, or the address.

        Raises Unauthorized for a key that is missing or wrong, where there are keys.
        """
        name = self._of_key(_key(scope)) or self.logins.client(scope)
        if name:
            return name
        if self._digests and not scope["route_handler"].opt.get(OPEN):
            raise _unknown_key()
        return f"address {scope['client'][0]}" if scope["client"] else ""

    def login(self, key: str) -> str:
        """The name of whoever has `key`. Raises Unauthorized, or RequestError where no key is needed."""
        if not self._digests:
            raise RequestError("this server has no API keys", hint="ask without one", param="key")
        if name := self._of_key(key):
            return name
        raise _unknown_key()

    def is_host(self, scope: Scope) -> bool:
        """Whoever has a key is, or whoever reaches a server that is there for this machine alone."""
        return self.serves_here_alone or bool(self._of_key(_key(scope)) or self.logins.client(scope))

    def _of_key(self, key: str) -> str:
        digest = _digest(key)
        known = [compare_digest(digest, each) for each in self._digests]
        return f"key {digest.hex()[:16]}" if any(known) else ""


class Access:
    """Middleware. Sets the scope's `auth` to the client's name.

    Raises Unauthorized for a key that is missing or wrong, where there are keys; Forbidden for a web page of an origin
    that `cors` does not allow, and for one that came here by a trick of DNS, where no key would stop it; HostOnly for
    what is the host's, where anybody may ask.
    """

    def __init__(self, app: ASGIApp, callers: Callers, cors: CORSConfig | None) -> None:
        self._app = app
        self._callers = callers
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refuse_pages(Headers.from_scope(scope))
        scope["auth"] = self._callers.name(scope)
        if scope["route_handler"].opt.get(HOST) and not self._callers.is_host(scope):
            raise HostOnly(
                "this is for the host alone",
                "this server lets everyone in, so it can't tell who that is",
                "give it an API key in place of --allow-anonymous-api, or use `core invite` and `core members`",
            )
        await self._app(scope, receive, send)

    def _refuse_pages(self, headers: Headers) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if self._callers.serves_here_alone and not _HERE.fullmatch(host):
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


def _unknown_key() -> Unauthorized:
    return Unauthorized(
        "the API key is missing or wrong",
        hint="send one that this server was given, as 'Authorization: Bearer KEY'",
    )


def _key(scope: Scope) -> str:
    """Of OpenAI's clients, or of Anthropic's, some of which have a header of their own."""
    headers = Headers.from_scope(scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
