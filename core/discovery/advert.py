"""What a coordinator announces of itself, as a DNS-SD record's keys and values. Anyone may write such a record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from core.interfaces.transport import DEFAULT_TRANSPORT
from core.trust.addresses import is_loopback
from core.trust.cluster import Cluster
from core.trust.identity import short_id

MAX_HOSTS = 4
_VALUE_BYTES = 200
"""RFC 6763, 6.1: key and value have 255 bytes together."""
_LONGEST_NAME = 60
_TRANSPORT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


@dataclass(frozen=True, slots=True)
class Advert:
    """A cluster that can be asked to join: the model's `name`, and where its coordinator is.

    `fingerprint` is the SHA-256 of the certificate that it claims to have, `protocol` the version that it speaks,
    `transport` the name of what it is reached by.
    """

    name: str
    hosts: tuple[str, ...]
    port: int
    fingerprint: bytes
    protocol: int
    transport: str = DEFAULT_TRANSPORT

    @property
    def key(self) -> str:
        """By which people tell clusters apart, whatever they call themselves."""
        return short_id(self.fingerprint)

    def cluster(self) -> Cluster:
        """For Membership.ask."""
        return Cluster(self.hosts, self.port, self.fingerprint, transport=self.transport)

    def properties(self) -> dict[str, str]:
        """The TXT record (RFC 6763, section 6)."""
        return {
            "name": _plain(self.name),
            "hosts": _as_many_as_fit(self.hosts),
            "fingerprint": self.fingerprint.hex(),
            "protocol": str(self.protocol),
            "transport": self.transport,
        }

    @classmethod
    def read(cls, port: int | None, properties: Mapping[bytes, bytes | None]) -> Advert | None:
        """None for a record that is not as `properties` writes it, or that leads nowhere."""
        try:
            name, hosts, fingerprint, protocol = (
                _text(properties[key]) for key in (b"name", b"hosts", b"fingerprint", b"protocol")
            )
            transport = _text(properties.get(b"transport", DEFAULT_TRANSPORT.encode()))
        except (KeyError, ValueError):
            return None
        found = tuple(host for host in hosts.split(",")[:MAX_HOSTS] if _leads_elsewhere(host))
        numbers = re.fullmatch(r"[0-9a-f]{64}", fingerprint) and re.fullmatch(r"[0-9]{1,6}", protocol)
        numbers = numbers and _TRANSPORT.fullmatch(transport)
        if not found or not numbers or port is None or not 0 < port < 65_536:
            return None
        return cls(_plain(name), found, port, bytes.fromhex(fingerprint), int(protocol), transport)


def _text(value: bytes | None) -> str:
    if value is None or len(value) > _VALUE_BYTES:
        raise ValueError("a value is missing, or too long")
    return value.decode()


def _plain(name: str) -> str:
    """A name that can stand in a terminal."""
    shown = "".join(letter for letter in name if letter.isprintable())
    return shown.encode()[:_LONGEST_NAME].decode(errors="ignore").strip() or "unnamed"


def _as_many_as_fit(hosts: tuple[str, ...]) -> str:
    fitting = list(hosts[:MAX_HOSTS])
    while len(",".join(fitting)) > _VALUE_BYTES:
        fitting.pop()
    return ",".join(fitting)


def _leads_elsewhere(host: str) -> bool:
    if is_loopback(host):
        return False
    try:
        address = ip_address(host)
    except ValueError:
        return len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
    return not (address.is_unspecified or address.is_multicast)
