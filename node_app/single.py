"""One app per user: the first holds a lock, later ones hand it what they were started for, and end."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec
from filelock import FileLock, Timeout

from core.errors import ConfigError
from core.trust.state_dir import StateDir

_LOCK = "app.lock"
_RUNNING = "app.json"
HAND_OVER_SECONDS = 20.0
"""What the other app may take to start, when both were started at once, or to end."""
_POLL_SECONDS = 0.1


class AlreadyRunning(Exception):
    """Another app of this user runs."""


@contextmanager
def only_one(state: StateDir) -> Iterator[None]:
    """Raises AlreadyRunning; one that is about to end is waited for. Whatever ends the process ends the lock."""
    lock = FileLock(state.path / _LOCK)
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while not _taken(lock):
        if state.read(_RUNNING) is not None or time.monotonic() > deadline:
            raise AlreadyRunning
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        withdraw(state)
        lock.release()


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError as error:
        raise ConfigError(f"{lock.lock_file} can't be written", error.strerror or str(error)) from None
    return True


class Running(msgspec.Struct, frozen=True):
    """The app that runs, by its page's address with the token in it. Its methods raise ConfigError."""

    url: str

    def ticket(self) -> str:
        """An address that opens the page once: what may stand on a browser's command line."""
        return self._ask("ticket", "")

    def join(self, invite: str) -> None:
        self._ask("join", invite)

    def follow(self, link: str) -> None:
        """The page offers it."""
        self._ask("link", link)

    def _ask(self, what: str, value: str) -> str:
        page = urlsplit(self.url)
        connection = http.client.HTTPConnection(page.netloc, timeout=5)
        try:
            body, headers = msgspec.json.encode(value), {"Content-Type": "application/json"}
            connection.request("POST", page.path + what, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise _deaf(str(error)) from error
        finally:
            connection.close()
        if answer.status == 400:
            raise ConfigError("the app that runs refused", text)
        if answer.status != 200:
            raise _deaf(f"status {answer.status}")
        return text


def announce(state: StateDir, url: str) -> None:
    """Where the running app's page is, for its owner's eyes."""
    state.write(_RUNNING, msgspec.json.encode(Running(url)))


def withdraw(state: StateDir) -> None:
    """The app is about to end: it takes nothing over any more."""
    state.remove(_RUNNING)


def find_running(state: StateDir) -> Running:
    """The app that holds the lock, once it answers. Raises ConfigError where it doesn't in time."""
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while True:
        try:
            running = _announced(state)
            running.ticket()
            return running
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _announced(state: StateDir) -> Running:
    try:
        return msgspec.json.decode(state.read(_RUNNING) or b"", type=Running)
    except msgspec.DecodeError as error:
        raise _deaf("it does not say where it is") from error


def _deaf(reason: str) -> ConfigError:
    return ConfigError("core-node runs already, but does not answer", reason, "end it first")
