"""One app per user: the first holds a lock, later ones hand it what they were started for, and end."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from filelock import FileLock, Timeout

from core.errors import ConfigError
from core.trust.state_dir import StateDir
from node_app.http import LOOPBACK

_LOCK = "app.lock"
_RUNNING = "app.json"
HAND_OVER_SECONDS = 20.0
"""What the other app may take to start, when both were started at once."""
_POLL_SECONDS = 0.1


class AlreadyRunning(Exception):
    """Another app of this user runs."""


class _Running(msgspec.Struct, frozen=True):
    port: int
    token: str


@contextmanager
def only_one(state: StateDir) -> Iterator[None]:
    """Raises AlreadyRunning. Whatever ends the process ends the lock."""
    lock = FileLock(state.path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise AlreadyRunning from None
    try:
        yield
    finally:
        state.remove(_RUNNING)
        lock.release()


def announce(state: StateDir, port: int, token: str) -> None:
    """Where the running app's page is, for its owner's eyes."""
    state.write(_RUNNING, msgspec.json.encode(_Running(port, token)))


def hand_over(state: StateDir, invite: str | None) -> None:
    """Has the running app join `invite`, or open its page. Raises ConfigError where it refuses, or doesn't answer."""
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while True:
        try:
            _ask(state, *(("open", "") if invite is None else ("join", invite)))
            return
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            if time.monotonic() > deadline:
                raise ConfigError("core-node runs already, but does not answer", str(error), "end it first") from error
            time.sleep(_POLL_SECONDS)


def _ask(state: StateDir, what: str, value: str) -> None:
    running = msgspec.json.decode(state.read(_RUNNING) or b"", type=_Running)
    connection = http.client.HTTPConnection(LOOPBACK, running.port, timeout=5)
    try:
        body, headers = msgspec.json.encode(value), {"Content-Type": "application/json"}
        connection.request("POST", f"/{running.token}/{what}", body, headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status == 400:
            raise ConfigError("the app that runs refused", text)
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
    finally:
        connection.close()
