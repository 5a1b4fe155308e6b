"""The log: a file that rotates, with everything; a person gets a sentence."""

from __future__ import annotations

import logging
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from core.errors import ConfigError
from core.one_line import OneLineFormatter

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_MEGABYTE = 2**20
_CHATTY = ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "PIL", "pystray", "Xlib")
_log = logging.getLogger(__name__)


def set_up(path: Path, *, to_stderr: bool) -> None:
    """Logs into `path`, three megabytes at most, and where asked to standard error; crashes of any thread too.

    Raises ConfigError where there can be no log. What a full disk does not take later is lost.
    """
    try:
        file = RotatingFileHandler(path, maxBytes=_MEGABYTE, backupCount=2, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the log {path} can't be written", error.strerror or str(error)) from None
    handlers: list[logging.Handler] = [file]
    if to_stderr:
        handlers.append(logging.StreamHandler())
    logging.raiseExceptions = False
    for handler in handlers:
        handler.setFormatter(OneLineFormatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = _note_crash
    threading.excepthook = lambda crash: _note_crash(crash.exc_type, crash.exc_value, crash.exc_traceback)


def _note_crash(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    _log.critical("crashed", exc_info=(kind, error or kind(), traceback))


def tail(path: Path, size: int) -> str:
    """The last `size` bytes of the log, from the beginning of a line."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            data = file.read()
    except OSError as error:
        return f"the log can't be read: {error}"
    text = data.decode(errors="replace")
    return text if end <= size else text.partition("\n")[2]
