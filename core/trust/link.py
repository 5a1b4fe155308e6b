"""Invite links: all that a friend's machine needs to find a cluster, know it for what it is, and be let in once."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address

from core.errors import ConfigError
from core.interfaces.transport import DEFAULT_TRANSPORT

PREFIX = "core://join/"
SECRET_BYTES = 16
MAX_HOSTS = 8
_VERSION, _WITH_TRANSPORT = 1, 2
"""The second is for a transport that isn't the default, whose name follows the hosts."""
_HEAD = struct.Struct("!B32s16sIHB")
"""Version, fingerprint, secret, expiry (seconds since 1970), port, number of hosts."""
_IPV4, _IPV6 = 0, 255
"""In front of a host; any other number is the length of a name."""
_CHECK_BYTES = 4
_NAME = re.compile(rb"[A-Za-z0-9_.-]+")
_LONGEST_TRANSPORT = 64


@dataclass(frozen=True, slots=True)
class InviteLink:
    """`fingerprint` is the SHA-256 of the coordinator's certificate, `expires` is in seconds since 1970.

    `transport` is the name of what the coordinator is reached by.
    """

    hosts: tuple[str, ...]
    port: int
    fingerprint: bytes
    secret: bytes
    expires: int
    transport: str = DEFAULT_TRANSPORT

    def __str__(self) -> str:
        """`core://join/` and base64 (RFC 4648, section 5): 96 characters with one IPv4 address."""
        version, end = _VERSION, b""
        if self.transport != DEFAULT_TRANSPORT:
            version, end = _WITH_TRANSPORT, _packed_transport(self.transport)
        head = _HEAD.pack(version, self.fingerprint, self.secret, self.expires, self.port, len(self.hosts))
        body = head + b"".join(map(_packed_host, self.hosts)) + end
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"InviteLink(hosts={self.hosts}, port={self.port})"

    @classmethod
    def parse(cls, text: str) -> InviteLink:
        """Raises ConfigError for what is no link, or not a whole one."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise ConfigError("that is no invite", f"an invite begins with {PREFIX}", "ask the host for `core invite`")
        encoded = text.removeprefix(PREFIX).rstrip("/")
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
            if check != _check(body):
                raise ValueError("its check sum is wrong")
            version, fingerprint, secret, expires, port, count = _HEAD.unpack_from(body)
            if version not in (_VERSION, _WITH_TRANSPORT):
                raise ConfigError("this invite is of another version", f"version {version}", "update core")
            hosts, rest = _unpacked_hosts(body[_HEAD.size :], count)
            transport = _unpacked_transport(rest) if version == _WITH_TRANSPORT else DEFAULT_TRANSPORT
            if version == _VERSION and rest:
                raise ValueError("there is more than its hosts")
            return cls(hosts, port, fingerprint, secret, expires, transport)
        except (ValueError, IndexError, struct.error, binascii.Error):
            raise ConfigError(
                "the invite is damaged", "it is not whole", "copy the whole link, without spaces"
            ) from None


def _check(body: bytes) -> bytes:
    return sha256(body).digest()[:_CHECK_BYTES]


def refuse_no_host(host: str) -> None:
    """Raises ConfigError for what is neither an address nor a name."""
    _packed_host(host)


def _packed_host(host: str) -> bytes:
    """Raises ConfigError for what is neither an address nor a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return _packed_name(host)
    return bytes([_IPV4 if address.version == 4 else _IPV6]) + address.packed


def _packed_name(host: str) -> bytes:
    try:
        name = host.encode("idna")
    except UnicodeError:
        name = b""
    if not 0 < len(name) < _IPV6 or not _NAME.fullmatch(name):
        raise ConfigError(f"{host!r} is no host", "", "give an IP address or a name, without a port")
    return bytes([len(name)]) + name


def _packed_transport(name: str) -> bytes:
    """Raises ConfigError for a name that an invite can't carry."""
    packed = name.encode()
    if len(packed) > _LONGEST_TRANSPORT or not _NAME.fullmatch(packed):
        raise ConfigError(f"no invite can name the transport {name!r}", "", "serve with another --transport")
    return packed


def _unpacked_transport(data: bytes) -> str:
    if len(data) > _LONGEST_TRANSPORT or not _NAME.fullmatch(data):
        raise ValueError("it names no transport")
    return data.decode("ascii")


def _unpacked_hosts(data: bytes, count: int) -> tuple[tuple[str, ...], bytes]:
    """The hosts, and what follows them."""
    hosts = []
    for _ in range(count):
        kind, data = data[0], data[1:]
        size = {_IPV4: 4, _IPV6: 16}.get(kind, kind)
        packed, data = data[:size], data[size:]
        if len(packed) < size:
            raise ValueError("a host is cut short")
        if kind == _IPV4:
            hosts.append(str(IPv4Address(packed)))
        elif kind == _IPV6:
            hosts.append(str(IPv6Address(packed)))
        else:
            hosts.append(packed.decode("ascii"))
    if not hosts:
        raise ValueError("it has no hosts")
    return tuple(hosts), data
