"""The state directory: a machine's key, and what it knows of its cluster, for its owner's eyes alone."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_data_path

from core.errors import ConfigError

ENVIRONMENT = "CORE_STATE_DIR"
LOCK_SECONDS = 5.0
_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class StateDir:
    """Files are written whole or not at all. Who reads, decides and writes holds `lock` meanwhile."""

    path: Path

    @classmethod
    def open(cls, path: Path | None = None) -> StateDir:
        """`path`, else what $CORE_STATE_DIR says, else the system's place for a user's data; made if it isn't there.

        Raises ConfigError where it can't be used, or where others may write to it.
        """
        chosen = path or Path(os.environ.get(ENVIRONMENT) or user_data_path("core-cluster", appauthor=False))
        chosen = chosen.expanduser().absolute()
        try:
            chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = chosen.stat().st_mode
        except OSError as error:
            raise ConfigError(
                f"the state directory {chosen} can't be used",
                error.strerror or str(error),
                f"choose another with --state-dir, or with {ENVIRONMENT} in the environment",
            ) from None
        if sys.platform != "win32" and mode & _OTHERS_WRITE:
            raise ConfigError(
                f"others may write to the state directory {chosen}",
                "it holds this machine's key",
                f"chmod 700 {chosen}",
            )
        return cls(chosen)

    def read(self, name: str) -> bytes | None:
        """None where there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Readable by its owner alone, and under its name only when it is whole."""
        handle, draft = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(self.path / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def changed(self, name: str) -> int:
        """When the file was last written, in nanoseconds; 0 where there is none."""
        try:
            return (self.path / name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextmanager
    def lock(self, name: str = "lock", seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """For one process at a time. Raises ConfigError where another holds it for longer than `seconds`."""
        try:
            with FileLock(self.path / name, timeout=seconds):
                yield
        except Timeout:
            raise ConfigError(
                f"the state directory {self.path} is in use", f"another process holds its {name}", "end it, or wait"
            ) from None
