"""Kernels that torch lacks, in C: compiled on this machine, where it has a C compiler, and kept in the user's cache.

They are among the kernels that are tried: what can't be compiled isn't there, and what is wrong is never taken.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from platformdirs import user_cache_path

_SOURCE = Path(__file__).with_name("small_floats.c")
_SECONDS = 60
_OPTIONS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_PROCESSOR = {"AVX512": ("-mavx512f", "-mavx2", "-mfma", "-mf16c"), "AVX2": ("-mavx2", "-mfma", "-mf16c")}
"""By what torch found this processor to have."""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they can't be had. Compiling takes about a second, once for each user."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    # On macOS the command may be one that offers to install a compiler; on Windows compilers want other options.
    if compiler is None or sys.platform != "linux" or not _SOURCE.is_file():
        return None
    options = (*_OPTIONS, *_PROCESSOR.get(torch.backends.cpu.get_cpu_capability(), ()))
    threads = _threads()
    key = repr((_SOURCE.read_bytes(), compiler, options, threads, torch.__version__))
    path = user_cache_path("core") / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    try:
        if not path.is_file():
            _compile(compiler, options, threads, path)
        return ctypes.CDLL(str(path))
    # There may be no room, no right to write or to run what was written, or a compiler that lacks a part of itself.
    except (OSError, subprocess.SubprocessError):
        return None


def _threads() -> tuple[str, ...]:
    """torch's own OpenMP, so that its threads compute and no others; none where it brings none."""
    found = sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*"))
    return (str(found[0]),) if found else ()


def _compile(compiler: str, options: tuple[str, ...], threads: tuple[str, ...], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        compiled, linked = Path(directory) / "kernels.o", Path(directory) / "kernels.so"
        parallel = ("-fopenmp",) if threads else ()
        _run(compiler, *options, *parallel, "-c", str(_SOURCE), "-o", str(compiled))
        _run(compiler, "-shared", str(compiled), *threads, "-o", str(linked))
        linked.replace(path)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
