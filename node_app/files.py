"""Where the app keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from core.errors import ConfigError

NAME = "core-node"


@dataclass(frozen=True, slots=True)
class Folders:
    """`config` holds what the user chose, `state` what the app notes for itself, `logs` the log."""

    config: Path
    state: Path
    logs: Path

    @classmethod
    def of_user(cls) -> Folders:
        """Those that the platform has for the user. Raises ConfigError where they can't be made."""
        dirs = platformdirs.PlatformDirs(NAME, appauthor=False)
        folders = cls(dirs.user_config_path, dirs.user_state_path, dirs.user_log_path)
        folders.make()
        return folders

    @classmethod
    def under(cls, root: Path) -> Folders:
        folders = cls(root / "config", root / "state", root / "logs")
        folders.make()
        return folders

    def make(self) -> None:
        for folder in (self.config, self.state, self.logs):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} can't be made", str(error)) from error
