"""Which addresses are this machine's own, and which of them others can reach."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

MOST = 4
"""Addresses in an invite: it is to stay short."""
_INNER = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "cni", "flannel", "podman", "lxc", "lxd")
"""Begin the names of interfaces that lead to containers and virtual machines, and nowhere else."""


def is_loopback(host: str) -> bool:
    """`host` may be an address or `localhost`; "" is not."""
    try:
        return _address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_this_machine(host: str) -> bool:
    """Whether whoever dials `host` from here stays here."""
    own = (address for interface in _interfaces() for address in interface.addresses)
    return is_loopback(host) or host in own


def host_of(peer: str) -> str:
    """The host of a channel's `peer`: host:port, with brackets around IPv6."""
    return peer.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    addresses: tuple[str, ...]


def reachable(listens_on: str = "") -> list[str]:
    """This machine's addresses that others are likely to reach, the likeliest first.

    `listens_on` is what a port was opened on that takes connections at all of IPv4, or all of IPv6: 0.0.0.0 or ::.
    """
    return best_of(_interfaces(), _address(listens_on).version if listens_on else None)


def best_of(interfaces: Iterable[Interface], version: int | None = None) -> list[str]:
    """IPv4 first, or one `version` alone. Those of containers and link-local ones only where there is nothing else;
    never loopback."""
    ranked = []
    for interface in interfaces:
        for text in interface.addresses:
            address = _address(text)
            if version not in (None, address.version):
                continue
            if not (address.is_loopback or address.is_unspecified or address.is_multicast):
                doubtful = address.is_link_local or interface.name.startswith(_INNER)
                ranked.append((doubtful, address.version, str(address)))
    good = sorted((rank for rank in ranked if not rank[0]), key=lambda rank: rank[1])
    return list(dict.fromkeys(text for _, _, text in good or ranked))[:MOST]


def _interfaces() -> list[Interface]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(name, tuple(entry.address for entry in entries if entry.family in families))
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    ]


def _address(host: str) -> IPv4Address | IPv6Address:
    address = ip_address(host.partition("%")[0])
    return (address.version == 6 and address.ipv4_mapped) or address
