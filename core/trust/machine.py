"""What tells this machine from a copy of its disk."""

from __future__ import annotations

import sys
import uuid
from hashlib import sha256
from pathlib import Path

_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_MULTICAST, _LOCAL = 1 << 40, 1 << 41
"""Bits of a hardware address that no maker sets: Python's own random one, and those of containers."""


def machine_mark() -> str:
    """A hash of what stays the same for this machine and no other, whatever its name. "" where nothing does.

    That is the operating system's own id, or the network card's address. A container often has neither.
    """
    identity = _system_id() or _hardware_address()
    return sha256(b"core machine " + identity.encode()).hexdigest()[:32] if identity else ""


def _system_id() -> str:
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as key:
            return str(winreg.QueryValueEx(key, "MachineGuid")[0])
    for path in _MACHINE_ID_FILES:
        try:
            if found := path.read_text(encoding="ascii").strip():
                return found
        except (OSError, UnicodeDecodeError):
            continue
    return ""


def _hardware_address() -> str:
    address = uuid.getnode()
    return "" if address & (_MULTICAST | _LOCAL) else f"{address:012x}"
