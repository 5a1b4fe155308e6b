"""Who asks: API keys, and the name by which the engine tells clients apart."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from litestar.datastructures import Headers
from litestar.types import ASGIApp, Receive, Scope, Send

from core.gateway.errors import Unauthorized

OPEN = "open"
"""The option of a route that needs no key."""


class Access:
    """Middleware. Sets the scope's `auth` to the client's name: a hash of its key, or else its address.

    Raises Unauthorized for a key that is missing or wrong, where there are keys.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["auth"] = self._client(scope)
        await self._app(scope, receive, send)

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
    scheme, _, key = Headers.from_scope(scope).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
