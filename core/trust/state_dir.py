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
_OTHERS, _OTHERS_WRITE = 0o077, 0o022


@dataclass(frozen=True, slots=True)
class StateDir:
    """Files are written whole or not at all. Who reads, decides and writes holds `lock` meanwhile."""

    path: Path

    @classmethod
    def open(cls, path: Path | None = None) -> StateDir:
        """`path`, else what $CORE_STATE_DIR says, else the system's place for a user's data.

        Raises ConfigError for what is no directory, or not the user's own.
        """
        chosen = path or Path(os.environ.get(ENVIRONMENT) or user_data_path("core-cluster", appauthor=False))
        state = cls(chosen.expanduser().absolute())
        if state.path.exists() and not state.path.is_dir():
            raise state._useless("it is a file")
        if state.path.exists():
            state._refuse_others()
        return state

    def _made(self) -> Path:
        """Raises ConfigError where it can't be used, or where others may write to it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._useless(error.strerror or str(error)) from None
        self._refuse_others()
        return self.path

    def _refuse_others(self) -> None:
        """Raises ConfigError where somebody else may put a key of theirs in the place of this machine's."""
        if sys.platform == "win32":
            return
        try:
            status = self.path.stat()
        except OSError as error:
            raise self._useless(error.strerror or str(error)) from None
        if status.st_uid not in (0, os.geteuid()):
            raise self._useless("it belongs to another user of this machine, and it holds this machine's key")
        if status.st_mode & _OTHERS_WRITE:
            raise ConfigError(
                f"others may write to the state directory {self.path}",
                "it holds this machine's key",
                f"chmod 700 {self.path}",
            )

    def _useless(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the state directory {self.path} can't be used",
            reason,
            f"choose another with --state-dir, or with {ENVIRONMENT} in the environment",
        )

    def read(self, name: str) -> bytes | None:
        """None where there is no such file. Others may not read it from then on. Raises ConfigError where it can't be
        read."""
        file = self.path / name
        try:
            data = file.read_bytes()
            if sys.platform != "win32" and file.stat().st_mode & _OTHERS:
                file.chmod(0o600)
            return data
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{self.path / name} can't be read", error.strerror or str(error)) from None

    def write(self, name: str, data: bytes) -> None:
        """Readable by its owner alone, and under its name only when it is whole. Raises ConfigError."""
        folder = self._made()
        try:
            self._write(folder, name, data)
        except OSError as error:
            raise ConfigError(f"{self.path / name} can't be written", error.strerror or str(error)) from None

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
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
        """Raises ConfigError."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path / name} can't be removed", error.strerror or str(error)) from None

    def version(self, name: str) -> tuple[int, int]:
        """Another one whenever the file was written, by whichever process."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return (0, 0)
        return (status.st_mtime_ns, status.st_ino)

    @contextmanager
    def lock(
        self, name: str = "lock", seconds: float = LOCK_SECONDS, otherwise: str = "end it, or wait"
    ) -> Iterator[None]:
        """For one process at a time. Raises ConfigError, with what to do `otherwise`, where another holds it for longer
        than `seconds`."""
        try:
            with FileLock(self._made() / name, timeout=seconds, thread_local=False):
                yield
        except Timeout:
            raise ConfigError(
                f"the state directory {self.path} is in use", f"another process holds its {name}", otherwise
            ) from None
