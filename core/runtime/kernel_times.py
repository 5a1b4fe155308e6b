"""How long kernels take on this machine, kept in the user's cache: so that each process need not find it out anew."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

from core.runtime.kept_file import KeptFile

Times = dict[int, dict[str, float]]
"""Seconds by the number of rows, and by the kernel's name."""
_ByMachine = dict[str, dict[str, Times]]

_CHOSEN_BY_USERS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that restrict which instructions the kernels use."""


class KernelTimes:
    """One small file."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a `path`, it is in the user's cache."""
        self._file: KeptFile[_ByMachine] = KeptFile("kernels.json", _ByMachine, path)

    @property
    def path(self) -> Path:
        return self._file.path

    @path.setter
    def path(self, path: Path) -> None:
        self._file.path = path

    def recall(self, key: str) -> Times | None:
        return self._read().get(machine(), {}).get(key)

    def keep(self, key: str, times: Times) -> None:
        found = self._read()
        found.setdefault(machine(), {})[key] = times
        self._file.write(found)

    def _read(self) -> _ByMachine:
        return self._file.read() or {}


def machine() -> str:
    """What the times hold for: processor, the instructions that may be used, torch."""
    restricted = [f"{name}={os.environ[name]}" for name in _CHOSEN_BY_USERS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([_processor(), capability, *restricted, f"torch {torch.__version__}"])


def _processor() -> str:
    """Its name, and a digest of what it says it can, which a virtual machine may restrict."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {name.strip(): value.strip() for name, value in told.items()}
    digest = hashlib.sha256(told.get("flags", told.get("Features", "")).encode()).hexdigest()[:8]
    return f"{told.get('model name', platform.machine())} {digest}"
