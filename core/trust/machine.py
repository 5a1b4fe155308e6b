"""What tells this machine from a copy of its disk."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

import psutil

_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_MULTICAST, _LOCAL = 1 << 40, 1 << 41
"""Bits of a hardware address that no maker sets: containers and private Wi-Fi addresses have the second."""
_LINK = getattr(psutil, "AF_LINK", getattr(socket, "AF_PACKET", -1))


@dataclass(frozen=True, slots=True)
class MachineMark:
    """Hashes of the operating system's own id, which a copied disk has too, and of the network cards' addresses.

    "" and no cards if there is nothing of the kind, as in a container.
    """

    system: str = ""
    cards: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Self:
        system = _system_id()
        return cls(_hash(system) if system else "", frozenset(map(_hash, _hardware_addresses())))

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` wrote."""
        system, *cards = text.split(" ")
        return cls(system, frozenset(filter(None, cards)))

    def __str__(self) -> str:
        return " ".join((self.system, *sorted(self.cards)))

    def is_of_another_machine(self, other: MachineMark) -> bool:
        """Whether the two can't be of one machine: it keeps its id, and one of its cards at least."""
        other_system = self.system and other.system and self.system != other.system
        other_cards = self.cards and other.cards and not self.cards & other.cards
        return bool(other_system or other_cards)

    def with_cards_of(self, other: MachineMark) -> MachineMark:
        return MachineMark(self.system or other.system, self.cards | other.cards)


def _hash(identity: str) -> str:
    return sha256(b"core machine " + identity.encode()).hexdigest()[:32]


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


def _hardware_addresses() -> Iterator[str]:
    """Those that makers gave, in hexadecimal."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            digits = address.address.replace(":", "").replace("-", "").lower()
            if address.family == _LINK and len(digits) == 12 and _is_makers(int(digits, 16)):
                yield digits


def _is_makers(address: int) -> bool:
    return address != 0 and not address & (_MULTICAST | _LOCAL)
