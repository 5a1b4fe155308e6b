"""The status page: for whoever has its token, on this machine alone.

The token is in the URL's path. A page of another site can't know it, so it can neither read nor ask for anything; the
Host header is checked as well, against names that lead here by a trick of DNS. The browser is opened with a ticket that
is good once and soon forgotten, for a URL on a command line can be read by other users of the machine.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from core.discovery.advert import Advert
from core.errors import ConfigError, CoreError
from node_app.http import LOOPBACK, Request, Response, serve
from node_app.joining import Offer
from node_app.limits_form import limits_from
from node_app.machine import Machine
from node_app.settings import Limits, Settings
from node_app.status import Status, headline, holdings, served, show_bytes

TICKET_SECONDS = 30.0
LOG_BYTES = 64 * 1024
_MAX_TICKETS = 16
T = TypeVar("T")
_ASSETS = {
    "": ("node_app", "page.html", "text/html; charset=utf-8"),
    "shared.css": ("core", "shared.css", "text/css; charset=utf-8"),
    "page.css": ("node_app", "page.css", "text/css; charset=utf-8"),
    "page.js": ("node_app", "page.js", "text/javascript; charset=utf-8"),
}
_GUARDS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
}


class Commands(Protocol):
    """What the page can see and do. All of it is called in the app's trio thread."""

    @property
    def status(self) -> Status: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def notice(self) -> str:
        """What the user should know of the app itself, "" for nothing."""

    @property
    def resumable(self) -> bool: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def free_memory(self) -> int:
        """Bytes, 0 before they were measured."""

    @property
    def offer(self) -> Offer | None:
        """A link that was opened elsewhere, and waits for its user's word."""

    @property
    def starts_at_login(self) -> bool: ...

    def join(self, invite: str) -> None:
        """Raises ConfigError for what is no invite."""

    def follow(self, link: str) -> None:
        """Offers a link that was opened elsewhere: its refusal becomes the notice, too."""

    def dismiss_offer(self) -> None: ...

    async def look_around(self) -> list[Advert]:
        """The clusters on the local network. Raises NoMulticast."""

    def ask(self, key: str) -> None:
        """To be let into the cluster with this key. Raises ConfigError where it was not found."""

    def leave_cluster(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def change_limits(self, limits: Limits) -> None: ...

    def start_at_login(self, wanted: bool) -> None:
        """Raises ConfigError where the desktop does not take it."""

    def end(self) -> None:
        """The whole app."""

    def log_tail(self, size: int) -> str: ...


class Page:
    """`run` serves it; `url` is where, with the token, once `run` has started."""

    def __init__(self, commands: Commands, version: str) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._commands = commands
        self._version = version
        self._tickets: dict[str, float] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self.port = await nursery.start(serve, self.answer)
            task_status.started()

    @property
    def url(self) -> str:
        return f"{self._origin}/{self.token}/"

    @property
    def _origin(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def ticket(self) -> str:
        """A URL that leads to the page once, within half a minute."""
        while len(self._tickets) >= _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = trio.current_time() + TICKET_SECONDS
        return f"{self._origin}/open/{ticket}"

    async def answer(self, request: Request) -> Response:
        response = await self._route(request)
        return replace(response, headers={**_GUARDS, **response.headers})

    async def _route(self, request: Request) -> Response:
        if request.headers.get("host") not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            return Response(b"this page is for this machine alone", status=403)
        match request.path.split("/", 2):
            case ["", "open", ticket]:
                return self._redeem(ticket)
            case ["", token, part] if hmac.compare_digest(token.encode(), self.token.encode()):
                return await self._inside(request, part)
        return Response(b"open the page from the icon's menu, or by the address that core-node printed", status=404)

    def _redeem(self, ticket: str) -> Response:
        if self._tickets.pop(ticket, 0.0) < trio.current_time():
            return Response(b"this address was good once, for half a minute: open the page anew", status=410)
        return Response(status=303, headers={"location": self.url})

    async def _inside(self, request: Request, part: str) -> Response:
        if request.method == "GET":
            return self._show(part)
        if request.method != "POST":
            return Response(b"GET or POST", status=405)
        if request.headers.get("origin", self._origin) not in (self._origin, f"http://localhost:{self.port}"):
            return Response(b"another site asks for this", status=403)
        if request.headers.get("content-type") != "application/json":
            return Response(b"the body must be application/json", status=415)
        if part == "find":
            return await self._look_around()
        if part == "ticket":
            return Response(self.ticket().encode())
        return self._perform(part, request.body)

    async def _look_around(self) -> Response:
        try:
            found = await self._commands.look_around()
        except CoreError as error:
            return Response(str(error).encode(), status=400)
        return _json([{"name": cluster.name, "key": cluster.key, "host": cluster.hosts[0]} for cluster in found])

    def _show(self, part: str) -> Response:
        if part == "status":
            return _json(self._status())
        if part == "log":
            return Response(self._commands.log_tail(LOG_BYTES).encode())
        if part in _ASSETS:
            package, name, kind = _ASSETS[part]
            return Response((files(package) / "web" / name).read_bytes(), kind)
        return Response(b"there is no such page", status=404)

    def _status(self) -> dict[str, Any]:
        status, settings, machine = self._commands.status, self._commands.settings, self._commands.machine
        return {
            "state": status.state,
            "headline": headline(status),
            "reason": status.reason,
            "code": status.code,
            "offer": self._commands.offer,
            "cluster": status.cluster,
            "model": status.model,
            "holdings": holdings(status),
            "served": served(status),
            "tokens_per_second": status.tokens_per_second,
            "fraction": status.fraction,
            "resumable": self._commands.resumable,
            "limits": settings.limits,
            "devices": machine.devices,
            "cores": machine.cores,
            "memory": _free(self._commands.free_memory, machine.memory),
            "starts_at_login": self._commands.starts_at_login,
            "notice": self._commands.notice if self._commands.notice != status.reason else "",
            "version": self._version,
        }

    def _perform(self, part: str, body: bytes) -> Response:
        asked: dict[str, Callable[[], None]] = {
            "join": lambda: self._commands.join(_text(body)),
            "link": lambda: self._commands.follow(_text(body)),
            "ask": lambda: self._commands.ask(_text(body)),
            "leave": self._commands.leave_cluster,
            "pause": self._commands.pause,
            "resume": self._commands.resume,
            "limits": lambda: self._commands.change_limits(limits_from(body, self._commands.machine)),
            "dismiss": self._commands.dismiss_offer,
            "login": lambda: self._commands.start_at_login(_decoded(body, bool, "at login is true or false")),
            "quit": self._commands.end,
        }
        if part not in asked:
            return Response(b"there is no such thing to do", status=404)
        try:
            asked[part]()
        except CoreError as error:
            return Response(str(error).encode(), status=400)
        return _json(self._status())


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), "application/json")


def _free(free: int, total: int) -> str:
    return f"{show_bytes(free)} of {show_bytes(total)} are free now" if free else ""


def _text(body: bytes) -> str:
    """A JSON string. Raises ConfigError."""
    return _decoded(body, str, "an invite or a key is text")


def _decoded(body: bytes, kind: type[T], wanted: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(wanted, "something else came") from error
