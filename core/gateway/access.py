"""Who asks: API keys, web pages, and the name by which the engine tells clients apart."""

from __future__ import annotations

import re
from hashlib import sha256
from hmac import compare_digest

from litestar.config.cors import CORSConfig
from litestar.datastructures import Headers
from litestar.types import ASGIApp, Receive, Scope, Send

from core.gateway.errors import Forbidden, Unauthorized
from core.gateway.settings import ApiSettings

OPEN = "open"
"""The option of a route that needs no key."""


_HERE = re.compile(
    r"(\[[0-9a-f:.]+\]|[0-9.]+|localhost|[\w.-]+\.localhost|host\.(docker|containers)\.internal)(:\d+)?", re.IGNORECASE
)
"""What a Host header may be where this machine alone is served: an address, a name that no stranger can give an
address, or the one by which a container knows its machine."""


class Access:
    """Middleware. Sets the scope's `auth` to the client's name: a hash of its key, or else its address.

    Raises Unauthorized for a key that is missing or wrong, where there are keys; Forbidden for a web page of an origin
    that `cors` does not allow, and for one that came here by a trick of DNS, where no key would stop it.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings, cors: CORSConfig | None) -> None:
        self._app = app
        self._digests = [_digest(key) for key in settings.keys]
        self._serves_here_alone = not (settings.keys or settings.allow_anonymous)
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refuse_pages(Headers.from_scope(scope))
        scope["auth"] = self._client(scope)
        await self._app(scope, receive, send)

    def _refuse_pages(self, headers: Headers) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if self._serves_here_alone and not _HERE.fullmatch(host):
            raise Forbidden(
                f"without an API key this server answers to no {host!r}",
                "a web page may have given its own name this machine's address",
                "ask by an address or as localhost; or give the server an API key, or --allow-anonymous-api",
            )
        if origin is None or headers.get("sec-fetch-site") == "same-origin" or origin.partition("://")[2] == host:
            return
        if self._cors is None or not self._cors.is_origin_allowed(origin):
            raise Forbidden(f"pages of {origin} may not ask", hint="the server's option --cors-origin lets them")

    def _client(self, scope: Scope) -> str:
        digest = _digest(_key(scope))
        known = [compare_digest(digest, each) for each in self._digests]
        if any(known):
            return f"key {digest.hex()[:16]}"
        if self._digests and not scope["route_handler"].opt.get(OPEN):
            raise Unauthorized(
                "the API key is missing or wrong",
                hint="send one that this server was given, as 'Authorization: Bearer KEY'",
            )
        return f"address {scope['client'][0]}" if scope["client"] else ""


def _key(scope: Scope) -> str:
    """Of OpenAI's clients, or of Anthropic's, some of which have a header of their own."""
    headers = Headers.from_scope(scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
