"""Whether multicast works on this machine: it sends a question to all, and hears it itself."""

from __future__ import annotations

import secrets
import socket
import struct
import time

from core.errors import NoMulticast

GROUP, PORT = "224.0.0.251", 5353
"""Multicast DNS (RFC 6762, section 3)."""
HEAR_SECONDS = 0.5
_HEADER = struct.Struct("!6H")
_TYPE_A, _CLASS_IN = 1, 1


def hear_oneself(address: str, seconds: float = HEAR_SECONDS) -> None:
    """By the interface that has this IPv4 address. Raises NoMulticast where nothing is heard in time."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) as heard:
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            heard.bind(("", PORT))
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            group = socket.inet_aton(GROUP) + socket.inet_aton(address)
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            question = _question()
            heard.sendto(question, (GROUP, PORT))
            _wait_for(question, heard, time.monotonic() + seconds)
    except TimeoutError:
        raise NoMulticast(f"no multicast at {address}", "what it sends does not come back") from None
    except OSError as error:
        raise NoMulticast(f"no multicast at {address}", error.strerror or str(error)) from None


def _wait_for(question: bytes, heard: socket.socket, deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        heard.settimeout(left)
        if heard.recv(len(question)) == question:
            return
    raise TimeoutError


def _question() -> bytes:
    """Where a host is whose name nobody has (RFC 1035, section 4)."""
    labels = (b"core-" + secrets.token_hex(8).encode(), b"local")
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return _HEADER.pack(0, 0, 1, 0, 0, 0) + name + struct.pack("!2H", _TYPE_A, _CLASS_IN)
