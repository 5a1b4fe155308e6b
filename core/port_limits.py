"""What bounds every port of a process: the files that it may have open, and who counts as one address."""

from __future__ import annotations

import sys
from ipaddress import IPv6Address, ip_address, ip_network

API_SHARE, NODES_SHARE = 3, 4
"""The API takes one connection for so many of the files that the process may open, and the port of nodes one for so
many: neither starves the other, and models and logs have what is left."""
_WANTED_FILES = (65_536, 10_240, 4096)
"""From the best on: some systems refuse a number although they say that there is no limit."""


def raise_open_files() -> None:
    """Lets this process open as many files as the system allows it, within reason. For the start of a program."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED_FILES:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= allowed:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            return
        except (OSError, ValueError):
            continue


def connections_within(share: int, at_most: int) -> int:
    """How many connections a port may have that gets one in `share` of the files."""
    if sys.platform == "win32":
        return at_most
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return at_most if soft == resource.RLIM_INFINITY else min(at_most, soft // share)


def neighbourhood(host: str) -> str:
    """The addresses that may be one machine's: of IPv6 a network of 64 bits, which a household is given whole.

    "" for this machine itself. Whatever is no address stands for itself.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return ""
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)
