"""What the commands share: logging, progress bars, and running until Ctrl-C or a signal to end."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum

import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from core.errors import ConfigError
from core.interfaces.dtypes import DType
from core.one_line import OneLineFormatter
from core.port_limits import raise_open_files

LOG_LEVELS = ("debug", "info", "warning", "error")
_GB = 10**9
_ENDLESS = 10_000


class DTypeOption(StrEnum):
    """The values of --dtype and --wire-dtype."""

    AUTO = "auto"
    FP16 = DType.FP16.value
    BF16 = DType.BF16.value
    FP32 = DType.FP32.value

    @property
    def dtype(self) -> DType | None:
        """None: auto."""
        return None if self is DTypeOption.AUTO else DType(self.value)


def set_up_logging(level: str) -> None:
    """Logs to standard error. Raises ConfigError for a level that there isn't."""
    if level not in LOG_LEVELS:
        raise ConfigError(f"there is no log level {level!r}", "", f"there are: {', '.join(LOG_LEVELS)}")
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(OneLineFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[to_stderr])
    for chatty in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def run(main: Callable[[], Awaitable[None]], *, end: Callable[[], None] | None = None) -> None:
    """Runs `main` in trio until it ends, or until SIGTERM or Ctrl-C, either of which cancels it cleanly.

    With `end`, the first signal calls that, and it is the second which cancels. Raises KeyboardInterrupt when all is
    done, if Ctrl-C ended it.
    """
    raise_open_files()
    if signal.SIGINT in trio.run(_until_signalled, main, end):
        raise KeyboardInterrupt


async def _until_signalled(main: Callable[[], Awaitable[None]], end: Callable[[], None] | None) -> list[int]:
    """The signals that came."""
    heeded: list[int] = []
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_heed, signals, heeded, end, nursery.cancel_scope)
            await main()
            nursery.cancel_scope.cancel()
    return heeded


async def _heed(
    signals: AsyncIterator[int], heeded: list[int], end: Callable[[], None] | None, scope: trio.CancelScope
) -> None:
    async for number in signals:
        heeded.append(number)
        if end is not None and len(heeded) == 1:
            end()
        else:
            typer.echo("stopping", err=True)
            scope.cancel()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block: something is to be undone then. Within `run` nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Bars:
    """Progress bars on standard error, one per name; silent where that is no terminal, or unless `shown`."""

    def __init__(self, *, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (shown and Console(stderr=True).is_terminal),
        )
        self._tasks: dict[str, TaskID] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Bars:
        self._stack.enter_context(interruptible())
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, bars: Mapping[str, tuple[int, int]]) -> None:
        """Name -> (bytes done, bytes in all). A bar that is not named any more disappears."""
        for name in self._tasks.keys() - bars.keys():
            self._progress.remove_task(self._tasks.pop(name))
        for name, (done, total) in bars.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name)
            self._progress.update(self._tasks[name], completed=done, total=total)


def output() -> Console:
    """Standard output, as wide as the terminal. Where there is none, and no COLUMNS, no line is broken."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _ENDLESS
    return Console(markup=False, highlight=False, width=width)


def table(*columns: str, right: Collection[str] = ()) -> Table:
    """An empty one. A cell that is too long for the terminal is broken into lines, not cut."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return made


def aligned(*rows: tuple[str, ...], indent: int = 0) -> str:
    """Rows of cells as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" " * indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def why(error: OSError | UnicodeError) -> str:
    """For a sentence that names the file itself."""
    return getattr(error, "strerror", None) or str(error)


def describe_precision(quant: str, dtype: str, wire_dtype: str, quality: str) -> str:
    """How weights are packed, what is computed in, and what that costs in quality, if it is known."""
    return f"quant {quant}, dtype {dtype}, wire dtype {wire_dtype}" + (f" ({quality})" if quality else "")


def gigabytes(value: float | None) -> int | None:
    """GB of an option -> bytes."""
    return None if value is None else int(value * _GB)


def show_bytes(value: int) -> str:
    return f"{value / _GB:.2f} GB" if value >= _GB / 10 else f"{value / 10**6:.1f} MB"
