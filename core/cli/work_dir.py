"""Where a node keeps what it needs only for a while."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from core.cli.console import why
from core.errors import ConfigError

_SYSTEMS = ("TMPDIR", "TEMP", "TMP")
"""Which directory for temporary files this process's children take, on any system."""
_OTHERS = {"TORCHINDUCTOR_CACHE_DIR": "compiled", "HF_XET_CACHE": "downloads"}
"""Code that --compile makes, and parts of files on their way from a hub; neither library is imported yet."""


def use_work_dir(path: Path) -> None:
    """Has this process and its children put such files into `path`. Raises ConfigError if it can't be used."""
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--work-dir {path} can't be used", why(error), "give a directory that can be written"
        ) from error
    tempfile.tempdir = str(path)
    os.environ.update(dict.fromkeys(_SYSTEMS, str(path)))
    for variable, folder in _OTHERS.items():
        os.environ.setdefault(variable, str(path / folder))
