"""Logins of the page: a browser shows an API key once, and from then on a cookie that no script can read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import sha256

from litestar.datastructures import Cookie, Headers
from litestar.types import Scope

LOGIN_SECONDS = 30 * 86_400
MAX_LOGINS = 256
"""A new one beyond these ends the oldest."""


class Logins:
    """Which keys are logged in, by the hash of the cookie's value. A restart of the server ends all."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._keys: dict[bytes, tuple[bytes, float]] = {}

    def open(self, key: bytes, scope: Scope) -> Cookie:
        """The cookie that stands for the key with this hash from now on."""
        while len(self._keys) >= MAX_LOGINS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(32)
        self._keys[_digest(token)] = key, self._now() + LOGIN_SECONDS
        return _cookie(scope, token, LOGIN_SECONDS)

    def close(self, scope: Scope) -> Cookie:
        """The cookie that takes the place of the request's own, which stands for nobody any more."""
        self._keys.pop(_digest(_shown(scope)), None)
        return _cookie(scope, "", 0)

    def key(self, scope: Scope) -> bytes:
        """The hash of the key that the request's cookie stands for, if a page of this server sends it; or empty."""
        if Headers.from_scope(scope).get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return b""
        key, until = self._keys.get(_digest(_shown(scope)), (b"", 0.0))
        return key if self._now() < until else b""


def _cookie(scope: Scope, value: str, seconds: int) -> Cookie:
    secure = scope["scheme"] == "https"
    return Cookie(_name(scope), value=value, max_age=seconds, httponly=True, samesite="strict", secure=secure)


def _name(scope: Scope) -> str:
    """Servers on one machine share its cookies, whatever their ports."""
    server = scope["server"]
    return f"core_login_{server[1] if server else 0}"


def _shown(scope: Scope) -> str:
    name = _name(scope)
    for part in Headers.from_scope(scope).get("cookie", "").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()
