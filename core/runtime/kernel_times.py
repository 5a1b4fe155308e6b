"""How long kernels take on this machine, kept in the user's cache: so that each process need not find it out anew."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import msgspec
import torch
from platformdirs import user_cache_path

Times = dict[int, dict[str, float]]
"""Seconds by the number of rows, and by the kernel's name."""
_ByMachine = dict[str, dict[str, Times]]

_CHOSEN_BY_USERS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that restrict which instructions the kernels use."""


class KernelTimes:
    """One small file. Where it is missing, damaged or can't be written, nothing was kept."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a `path`, it is in the user's cache."""
        self.path = path or user_cache_path("core") / "kernels.json"

    def recall(self, key: str) -> Times | None:
        return self._read().get(machine(), {}).get(key)

    def keep(self, key: str, times: Times) -> None:
        """Whole or not at all."""
        found = self._read()
        found.setdefault(machine(), {})[key] = times
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(msgspec.json.encode(found))
            Path(file.name).replace(self.path)
        except OSError:
            return

    def _read(self) -> _ByMachine:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_ByMachine)
        except (OSError, ValueError):
            return {}


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
